"""Downloads the wheels that a machine with JAX and PyTorch lacks for the kit, and prints their size.

    python -m benchmarks.gpu_minutes.wheels build/wheels

There: `pip install --no-index --no-deps --target SITE build/wheels/*.whl`, and SITE in PYTHONPATH.
"""

import subprocess
import sys
from pathlib import Path

NAMES = ("keras==3.15.1", "optree", "namex", "absl-py", "h5py", "ml-dtypes", "rich", "typer")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    command += [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run([*command, "-d", str(folder), *NAMES], check=True)
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
    print(f"{len(wheels)} wheels: {sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB of at most 64")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
