"""Errors for the reader: what was wrong, where, what was found, what is allowed, what to do next.

Every failure that a user can cause is one of these, so that a recipe prints one message (no traceback) and
ends with a documented exit code.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hfdist.secrets import MASK, mask_secrets

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
UNREAD = 141
"""Exit code where nobody reads the output any more and work is left, as shells have it after SIGPIPE."""

_LONGEST_VALUE, _LONGEST = 500, 4000
"""Characters of a value or a place, and of what else a message says."""


class HfdistError(Exception):
    """Base of all errors that hfdist raises on purpose.

    Args:
        what: one sentence, what is wrong.
        where: the config key, file or row that it concerns.
        found: the value that was found there; of a tuple, each item has a line of its own.
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

    def texts(self) -> dict[str, str | None]:
        """Give the parts of the error as text, by the names of the arguments: another process can raise it again."""
        parts = {part: getattr(self, part) for part in ("what", "where", "found", "allowed", "hint")}
        if isinstance(self.found, tuple):
            parts["found"] = "; ".join(map(str, self.found))
        return {part: None if value is None else str(value) for part, value in parts.items()}

    def __str__(self) -> str:
        """A line for each part: names of files and columns cannot begin another, nor write to the terminal."""
        parts = (
            ("where:", (self.where,), _LONGEST_VALUE),
            ("found:", self.found if isinstance(self.found, tuple) else (self.found,), _LONGEST_VALUE),
            ("allowed:", (self.allowed,), _LONGEST),
            ("try:", (self.hint,), _LONGEST),
        )
        lines = [f"{self.title}: {printable(self.what, _LONGEST)}"]
        for label, texts, longest in parts:
            for number, text in enumerate(texts):
                if text is not None:
                    lines.append(f"  {'' if number else label:<9}{printable(str(text), longest)}")
        return "\n".join(lines)


class ConfigError(HfdistError):
    """A key, a value or a combination in the config that cannot be used."""

    exit_code = 2
    title = "Config error"


class PartitionError(ConfigError):
    """A model that cannot be partitioned as the config asks."""

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


class BudgetError(HfdistError):
    """A run whose budget is used up, which has saved and can go on with a larger one. No launcher starts it again."""

    exit_code = 8
    title = "Budget used up"


class PreemptedError(HfdistError):
    """A run that was told to stop, has saved, and can go on. Not a mistake: the exit code says "start me again"."""

    exit_code = 75
    title = "Stopped"


def printable(text: str, longest: int | None = None) -> str:
    """Give text of unknown origin for a line of a terminal or a log: control characters escaped, secrets masked.

    Args:
        text: may be anything.
        longest: how many characters are kept.
    """
    # Cut first, as it may be a file's whole content; and cut after the end, where a secret may begin.
    short = text if longest is None else text[: 2 * longest]
    safe = "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in mask_secrets(short))
    if longest is None or (short == text and len(safe) <= longest):
        return safe
    if short != text and " " in safe and not safe.endswith(MASK):
        # The word that is cut may be a part of a secret, which no mask knows.
        safe = safe.rpartition(" ")[0]
    return f"{safe[:longest]} ..."


def nearest(word: str, known: Iterable[str], template: str = "{}", *, cutoff: float = 0.5) -> str | None:
    """Give `template` with the known word that is most like `word` in it; None: no word is like it.

    The same letters in another case are most like it, then the first word of which it is the beginning: `a100` is
    `a100_40gb`, and not `a10`.
    """
    words = list(known)
    lower = word.lower()
    same = [one for one in words if one.lower() == lower]
    longer = [one for one in words if re.match(rf"{re.escape(lower)}[_./-]", one.lower())] if lower else []
    by_lower = {one.lower(): one for one in reversed(words)}
    close = [by_lower[one] for one in difflib.get_close_matches(lower, by_lower, n=1, cutoff=cutoff)]
    found = next(iter([*same, *longer, *close]), None)
    return None if found is None else template.replace("{}", found, 1)


def first_line(error: BaseException) -> str:
    """Give the first line of what an error says, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def named_line(error: BaseException) -> str:
    """Give the kind of an error, and the first line of what it says if it says anything."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"
