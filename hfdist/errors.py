"""Errors for the reader: what was wrong, where, what was found, what is allowed, what to do next.

Every failure that a user can cause is one of these, so that a recipe prints one message (no traceback) and
ends with a documented exit code.
"""

from __future__ import annotations


class HfdistError(Exception):
    """Base of all errors that hfdist raises on purpose.

    Args:
        what: one sentence, what is wrong.
        where: the config key, file or row that it concerns.
        found: the value that was found there.
        allowed: the values that would be accepted.
        hint: the next move, as a command or an override where possible.
    """

    exit_code = 1
    title = "Error"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        found: object = None,
        allowed: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.found = found
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        rows = [
            ("where", self.where),
            ("found", None if self.found is None else _printable(str(self.found))),
            ("allowed", self.allowed),
            ("try", self.hint),
        ]
        lines = [f"{self.title}: {self.what}"]
        lines += [f"  {label + ':':<9}{text}" for label, text in rows if text is not None]
        return "\n".join(lines)


class ConfigError(HfdistError):
    """A key, a value or a combination in the config that cannot be used."""

    exit_code = 2
    title = "Config error"


class PartitionError(ConfigError):
    """A model that cannot be cut the way that the config asks."""

    title = "Partition error"


class DataError(HfdistError):
    """A source, shard or row that cannot be read, or too little data."""

    exit_code = 3
    title = "Data error"


class CheckpointError(HfdistError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 4
    title = "Checkpoint error"


class NumericsError(HfdistError):
    """A loss or a gradient that is not finite."""

    exit_code = 5
    title = "Numerics error"


class PeerError(HfdistError):
    """A rank that is dead, hung or cut off, for which the others would wait."""

    exit_code = 6
    title = "Peer lost"


class ResourceError(HfdistError):
    """Too little disk, memory or devices, or a Hub that does not answer: what may be there at the next start."""

    exit_code = 7
    title = "Resource error"


class PreemptedError(HfdistError):
    """A run that was told to stop, has saved, and can go on. Not a mistake: the exit code says "start me again"."""

    exit_code = 75
    title = "Stopped"


def _printable(text: str) -> str:
    """Escape control characters, so that data cannot write to the terminal, and keep messages short."""
    safe = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return safe if len(safe) <= 500 else safe[:500] + " ..."
