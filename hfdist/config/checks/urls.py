"""Addresses of files behind a network: which are understood, what must not be in them, how they are shown."""

from __future__ import annotations

import importlib.util

from hfdist.config.checks.secrets import refuse_secrets
from hfdist.errors import ConfigError

SCHEMES = ("file", "http", "https", "s3", "gs", "hf", "memory")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Those that a plain installation lacks."""


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
    authority, slash, path = without_query(rest).partition("/")
    return scheme + separator + authority.rpartition("@")[2] + slash + path


def check_address(address: str, *, key: str) -> None:
    """Refuse what cannot be read, and secrets: the address is written into the run's folder.

    Args:
        address: a URL.
        key: the config key that holds it.

    Raises:
        ConfigError: an unknown scheme, a missing package, a user or password, or a signature.
    """
    if scheme_of(address) not in SCHEMES:
        raise ConfigError(
            "an address that cannot be read",
            where=key,
            found=redact(address),
            allowed="a path, or " + ", ".join(f"{scheme}://" for scheme in SCHEMES),
        )
    package = _PACKAGES.get(scheme_of(address) or "", "fsspec")
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the package {package} is missing, which reads it",
            where=key,
            found=redact(address),
            hint=f"pip install {package}",
        )
    refuse_secrets(address, key)
