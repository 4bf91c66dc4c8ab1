"""The folder `conf/`: where it lies, and which options its groups have."""

from __future__ import annotations

from pathlib import Path

from hfdist.errors import ConfigError

NOT_GROUPS = ("cluster", "hardware", "launch", "plan", "sweep")
"""Folders of `conf/` that hold no options of a run: of `hfdist job`, `plan` and `sweep`, and of accelerate."""


def shipped_folder() -> Path:
    """Give the folder `conf` of the installed package, or of a checkout, where it lies beside the package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if folder.is_dir():
            return folder
    what, hint = "the folder with the shipped configs is missing", "install hfdist again"
    raise ConfigError(what, where=str(package / "conf"), hint=hint)


def list_options(folder: Path, group: str) -> list[str]:
    """Give the names of a group's options; files whose names begin with `_` are parts of others, and no options."""
    return sorted(path.stem for path in (folder / group).glob("*.yaml") if not path.name.startswith("_"))


def groups_with(folder: Path, option: str) -> list[str]:
    """Give the groups in a folder that have an option of this name."""
    return [group for group in list_groups(folder) if option in list_options(folder, group)]


def list_groups(folder: Path) -> list[str]:
    """Give the names of the groups in a folder, without Hydra's own, and those whose names begin with `_`."""
    hidden = (*NOT_GROUPS, "hydra")
    names = (path.name for path in folder.iterdir() if path.is_dir() and list_options(path, "."))
    return sorted(name for name in names if name not in hidden and not name.startswith("_"))
