"""Check a user's own YAML files before Hydra reads them: size, aliases, syntax, repeated keys."""

from __future__ import annotations

from pathlib import Path

import yaml

from hfdist.errors import ConfigError

_LARGEST_BYTES = 1 << 20
# A few anchors are handy; many, nested, grow without bound when they are expanded.
_MOST_ALIASES = 50


def check_folder(folder: Path) -> None:
    """Check every YAML file below `folder`.

    Raises:
        ConfigError: no such folder, or a file that is too large, not YAML, empty, or full of aliases.
    """
    if not folder.is_dir():
        raise ConfigError("no such folder", where="--config-dir", found=str(folder))
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        _check_file(path)


def _check_file(path: Path) -> None:
    if path.suffix == ".yml":
        raise ConfigError("Hydra reads only .yaml files", where=str(path), hint=f"rename it to {path.stem}.yaml")
    size_bytes = path.stat().st_size
    if size_bytes > _LARGEST_BYTES:
        raise ConfigError("too large for a config", where=str(path), found=f"{size_bytes:,} bytes", allowed="1 MiB")
    try:
        text = path.read_text(encoding="utf-8-sig")
        num_aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader))
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8", where=f"{path}, byte {error.start}") from error
    except yaml.YAMLError as error:
        raise yaml_error(error, str(path)) from error
    if num_aliases > _MOST_ALIASES:
        raise ConfigError(
            "too many YAML aliases", where=str(path), found=f"{num_aliases} aliases", allowed=f"<= {_MOST_ALIASES}"
        )


def yaml_error(error: yaml.YAMLError, where: str) -> ConfigError:
    """Say where a YAML file breaks off."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if mark is None:
        return ConfigError(f"not YAML: {problem}", where=where)
    snippet = (mark.get_snippet(indent=0) or "").splitlines()
    hint = "indent with spaces" if "\\t" in problem else None
    return ConfigError(
        f"not YAML: {problem}",
        where=f"{where}, line {mark.line + 1}, column {mark.column + 1}",
        found=snippet[0].strip() if snippet else None,
        hint=hint,
    )
