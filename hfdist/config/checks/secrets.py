"""Secrets are refused wherever values come into a config, because a config is written down, logged and published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfdist.errors import ConfigError
from hfdist.secrets import MASK, kind_of_secret, mask_secrets, names_secret


def refuse_secrets(value: Any, key: str, *, place: str | None = None) -> None:
    """Refuse a value that a key's name or the value's own shape tells to be a secret, at any depth.

    Args:
        value: mappings and lists are looked through.
        key: its full name.
        place: the file or the command line, where it is known.

    Raises:
        ConfigError: names the key, never the value.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_secrets(item, f"{key}.{name}".lstrip("."), place=place)
    elif isinstance(value, list):
        for item in value:
            refuse_secrets(item, key, place=place)
    is_named = names_secret(key, value)
    kind = kind_of_secret(value) if isinstance(value, str) else None
    if is_named or kind is not None:
        raise ConfigError(
            f"this is {kind or 'a password or the like'}, which would be written into the run's folder",
            where=key if place is None else f"{key} ({place})",
            found=MASK if is_named else mask_secrets(str(value)),
            hint="leave it out; `hf auth login`, `wandb login`, ~/.netrc, AWS_* and FSSPEC_* give credentials",
        )
