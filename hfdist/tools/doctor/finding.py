"""The findings of the doctor, and how they are printed: each is a line with how bad it is and what to do. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from hfdist.units import count


class Level(StrEnum):
    """How bad a finding is, from the worst on. The members are texts, as findings travel between ranks as JSON."""

    error = "error"
    warning = "warning"
    ok = "ok"


class Finding(NamedTuple):
    """One result of a check, which is printed as one line."""

    check: str
    """Name of the check, such as `open files`."""
    level: Level
    text: str
    """What was found, with its figures."""
    hint: str | None = None
    """What to do; None: there is nothing to do."""
    host: str = ""
    """Name of the host that the finding is about; empty: it is about all hosts."""

    @classmethod
    def of(
        cls, check: str, text: str, *, error: bool = False, warning: bool = False, hint: str | None = None
    ) -> Finding:
        """Make a finding: an error if `error`, else a warning if `warning`; only these two have the hint."""
        if error:
            return cls(check, Level.error, text, hint)
        if warning:
            return cls(check, Level.warning, text, hint)
        return cls(check, Level.ok, text)


def _with_hosts(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Give each finding once, with its hosts; errors first, then in the order of the checks."""
    hosts: dict[Finding, list[str]] = {}
    for one in findings:
        hosts.setdefault(one._replace(host=""), []).append(one.host)
    order = {check: number for number, check in enumerate(dict.fromkeys(one.check for one in findings))}
    worst_first = list(Level)
    return sorted(hosts.items(), key=lambda item: (worst_first.index(item[0].level), order[item[0].check]))


def finding_lines(findings: Sequence[Finding], num_hosts: int) -> Iterator[str]:
    """Give a line for each finding, and a last line that counts them.

    Args:
        findings: the findings of all hosts.
        num_hosts: number of hosts; a finding that is not the same on all of them has their names.
    """
    width = max((len(one.check) for one in findings), default=0)
    for one, hosts in _with_hosts(findings):
        is_about_all = hosts == [""] or len(hosts) >= num_hosts
        place = "" if num_hosts == 1 or is_about_all else f"{', '.join(hosts)}: "
        hint = "" if one.hint is None else f"; try: {one.hint}"
        yield f"{one.level:<7}  {one.check:<{width}}  {place}{one.text}{hint}"
    counts = {level: sum(one.level == level for one in findings) for level in Level}
    words = [count(counts[level], level) for level in (Level.error, Level.warning)]
    yield f"{', '.join(words)}, {counts[Level.ok]} ok"


def to_json(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """Give the findings as JSON values, each once with the names of its hosts."""
    return [
        {"check": one.check, "level": one.level, "text": one.text, "hint": one.hint, "hosts": [h for h in hosts if h]}
        for one, hosts in _with_hosts(findings)
    ]
