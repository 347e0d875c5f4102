# Finds keras_mp and installs it. colab/build.py puts this into the first cell of each notebook.
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path


def kit_folder():
    """Returns the folder of a clone around or beside this notebook, or of what keras_mp.zip contained; or None."""
    places = [Path.cwd(), *Path.cwd().parents, *sorted(Path.cwd().glob("*"))]
    return next((place for place in places if (place / "keras_mp" / "__init__.py").is_file()), None)


def kit_archive():
    """Returns keras_mp.zip from beside this notebook, from the address in KERAS_MP_SOURCE, or from Colab's upload."""
    if beside := sorted(Path.cwd().glob("keras_mp*.zip")):
        return beside[-1]
    if address := os.environ.get("KERAS_MP_SOURCE"):
        return urllib.request.urlretrieve(address)[0]
    try:
        from google.colab import files
    except ImportError:
        uploaded = {}
    else:
        print("Choose keras_mp.zip. `make bundle` writes it, in a clone of keras_mp.")
        uploaded = files.upload()
    if not uploaded:
        raise SystemExit("keras_mp.zip is missing: put it beside this notebook, or set KERAS_MP_SOURCE to its address")
    return next(iter(uploaded))


def install(extras, needed):
    """Finds keras_mp, and installs it where it, or a package that this notebook needs, is missing."""
    missing = [name for name in ("keras_mp", "rich", "typer", *needed) if importlib.util.find_spec(name) is None]
    if kit_folder() is None:
        shutil.unpack_archive(kit_archive(), Path.cwd(), "zip")
    folder = kit_folder()
    if folder is None:
        raise SystemExit("the zip that was unpacked here contains no keras_mp; `make bundle` writes one that does")
    if missing:
        requirements = [f"{folder}[{extras}]"]
        if "inspect" in extras and importlib.util.find_spec("jax") is not None:
            # The compilers must be of the version of JAX that is here.
            version = importlib.metadata.version("jax")
            requirements += [f"jax[tpu]=={version}", f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
    # The examples in models/ and recipes/ are not installed. The processes that this notebook starts need them, too.
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()
    print(f"installed {', '.join(missing)}" if missing else "keras_mp and all that it needs were there")
