"""Addresses of files, and secrets: a config is written down, logged and published, so it holds none."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping

from hfdist.errors import ConfigError
from hfdist.secrets import MASK, RAW_PASSWORD, kind_of_secret, mask_secrets, names_secret

SCHEMES = ("file", "http", "https", "s3", "gs", "hf", "memory")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Packages that read an address of this scheme, and that a plain installation lacks."""


def scheme_of(address: str) -> str | None:
    """Give "s3" of "s3://bucket/key"; None for a path on this machine."""
    scheme, separator, _ = address.partition("://")
    return scheme.lower() if separator else None


def without_query(address: str) -> str:
    """Drop everything from the first question mark on."""
    return address.partition("?")[0]


def redact(address: str) -> str:
    """Drop user, password and query, which may be secret: for messages, logs and files."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    raw = re.match(f"{RAW_PASSWORD}@", rest)
    rest = rest if raw is None else rest[raw.end() :]
    authority, slash, path = without_query(rest).partition("/")
    return scheme + separator + authority.rpartition("@")[2] + slash + path


def check_address(address: str, *, key: str) -> None:
    """Raise a ConfigError on a URL that nothing here can read, or that holds a secret."""
    scheme, shown = scheme_of(address) or "", redact(address)
    if scheme not in SCHEMES:
        allowed = f"a path, or {', '.join(f'{known}://' for known in SCHEMES)}"
        raise ConfigError("an address that cannot be read", where=key, found=shown, allowed=allowed)
    package = _PACKAGES.get(scheme, "fsspec")
    if importlib.util.find_spec(package) is None:
        what = f"the package {package} is missing, which reads it"
        raise ConfigError(what, where=key, found=shown, hint=f"pip install {package}")
    refuse_secrets(address, key)


def refuse_secrets(value: object, key: str, *, place: str | None = None) -> None:
    """Refuse a value that a key's name or the value's own shape tells to be a secret, at any depth.

    `place` is the file or the command line, where it is known. The ConfigError names the key, never the value.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_secrets(item, f"{key}.{name}".lstrip("."), place=place)
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_secrets(item, key, place=place)
    is_named = names_secret(key, value)
    kind = kind_of_secret(value) if isinstance(value, str) else None
    if is_named or kind is not None:
        what = f"this is {kind or 'a password or the like'}, which would be written into the run's folder"
        found = MASK if is_named else mask_secrets(str(value))
        hint = "leave it out; `hf auth login`, `wandb login`, ~/.netrc, AWS_* and FSSPEC_* give credentials"
        raise ConfigError(what, where=key if place is None else f"{key} ({place})", found=found, hint=hint)
