"""Writes the repository, without its tests and its history, into one zip: `python colab/bundle.py [path]`.

The same files make the same zip, byte for byte.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "build" / "keras_mp.zip"
FOLDER = "keras_mp-source"
LEFT_OUT = ("tests/", ".")
# The first moment that a zip can hold.
DATE = (1980, 1, 1, 0, 0, 0)


def files() -> list[str]:
    """Lists the files that git tracks and the working tree has, without tests and hidden files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = sorted(name for name in listed.split("\0") if name and not name.startswith(LEFT_OUT))
    return [name for name in names if (ROOT / name).is_file()]


def write(path: Path = BUNDLE) -> Path:
    """Writes the zip, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name in files():
            entry = zipfile.ZipInfo(f"{FOLDER}/{name}", DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            bundle.writestr(entry, (ROOT / name).read_bytes())
    return path


if __name__ == "__main__":
    written = write(*map(Path, sys.argv[1:]))
    print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB. Upload it to Colab, or put it beside a notebook.")
