"""The commands that install what is missing, as they work where the kit runs."""

from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]


def install_command(extra: str, *packages: str) -> str:
    """The command that installs an extra of keras-mp.

    Args:
        extra: such as "jax", or several, "jax,data".
        packages: others to install with it, such as "jax[cuda13]".

    Returns:
        `pip install -e ".[jax]"` in a clone, whose path stands for the point in another folder; else
        `pip install "keras-mp[jax]"`.
    """
    clone = clone_folder()
    if clone is None:
        kit = f'"keras-mp[{extra}]"'
    else:
        kit = f'-e "{"." if clone == Path.cwd() else clone}[{extra}]"'
    return " ".join(["pip install", kit, *(f'"{package}"' for package in packages)])


def clone_folder() -> Path | None:
    """The clone of the repository that this package is part of; None where it was installed as a wheel."""
    project = _HERE / "pyproject.toml"
    try:
        return _HERE if 'name = "keras-mp"' in project.read_text() else None
    except OSError:
        return None
