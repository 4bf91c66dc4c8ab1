"""Translate what Hydra, OmegaConf and YAML raise into one message for the reader."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import yaml
from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from hfdist.config.files import yaml_error
from hfdist.config.keys import allowed_at, nearest_key
from hfdist.errors import ConfigError

_IN_FILE = re.compile(r"In '([^']+)'")


def explain(error: BaseException, overrides: Sequence[str]) -> ConfigError:
    """Give the message for an exception raised while composing."""
    chain = list(_chain(error))
    file = next((match[1] for link in chain if (match := _IN_FILE.search(str(link)))), None)
    for link in chain:
        match link:
            case ConfigError():
                return link
            case yaml.YAMLError():
                return yaml_error(link, _yaml_place(link, file))
            case MissingConfigException():
                return _missing_config(link)
            case OmegaConfBaseException() if link.full_key:
                return _at_key(link, link.full_key, file, overrides)
    lines = [line.strip() for line in str(chain[-1]).splitlines() if line.strip()]
    return ConfigError(lines[0] if lines else type(error).__name__, where=file or "config")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The cause first: it knows the key."""
    causes = []
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    return reversed(causes)


def _at_key(error: OmegaConfBaseException, key: str, file: str | None, overrides: Sequence[str]) -> ConfigError:
    override = next((text for text in overrides if text.lstrip("+~").split("=", 1)[0] == key), None)
    where = f"{key} ({'command line' if override else f'conf/{file}.yaml' if file else 'composed config'})"
    found = override.split("=", 1)[1] if override and "=" in override else _found(error)
    match error:
        case ValidationError():
            return ConfigError("a value of another kind", where=where, found=found, allowed=allowed_at(key))
        case InterpolationKeyError() | InterpolationResolutionError():
            return ConfigError(f"a reference leads nowhere: {_first_line(error)}", where=where, found=found)
        case MissingMandatoryValue():
            return ConfigError(
                "this key has no default", where=where, allowed=allowed_at(key), hint=f"{key}=VALUE on the command line"
            )
        case ConfigKeyError():
            near = nearest_key(key)
            hint = f"{near} instead" if near else None
            return ConfigError("no such key", where=where, found=found, allowed=allowed_at(key), hint=hint)
        case _:
            return ConfigError(_first_line(error), where=where, found=found, allowed=allowed_at(key))


def _found(error: OmegaConfBaseException) -> str | None:
    match = re.search(r"[Vv]alue:? '?([^']*)'? of type|Invalid value '([^']*)'|value: (.*)", str(error))
    return next((group for group in match.groups() if group is not None), None) if match else None


def _missing_config(error: MissingConfigException) -> ConfigError:
    options = [str(option) for option in error.options or ()]
    return ConfigError(
        "no such config",
        where=error.missing_cfg_file or "--config-name",
        allowed=", ".join(options) or None,
        hint="--help lists the groups and their options",
    )


def _yaml_place(error: yaml.YAMLError, file: str | None) -> str:
    mark = getattr(error, "problem_mark", None)
    return str(mark.name) if mark is not None and mark.name else f"{file}.yaml" if file else "a YAML file"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
