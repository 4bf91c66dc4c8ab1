"""The examination of one machine by `hfdist doctor`: what is asked, what is checked, what is printed. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.errors import ResourceError
from hfdist.tools.doctor import machine, software, storage
from hfdist.tools.doctor.finding import Finding, Level, finding_lines, to_json
from hfdist.tools.doctor.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of `hfdist doctor`, checked."""

    run_dir: Path
    """Folder of runs."""
    processes: int
    """Number of processes to start; 1: no further ones than this process, or those of a launcher."""
    pair_seconds: float
    """Seconds that two ranks may take to connect, and for a message."""
    as_json: bool
    """Whether the findings are printed as JSON."""
    is_offline: bool = False
    """Whether the Hub must not be asked."""


def report(findings: Sequence[Finding], pairs: Sequence[Pair], hosts: Sequence[str], *, as_json: bool) -> None:
    """Print the findings, and end this process with exit code 7 if one is an error.

    Args:
        findings: findings of all machines.
        pairs: pairs of ranks whose links were tried, for the JSON.
        hosts: host of each rank.
        as_json: whether to print JSON.
    """
    code = ResourceError.exit_code if any(one.level == Level.error for one in findings) else 0
    if as_json:
        found = {"findings": to_json(findings), "pairs": [pair.to_json() for pair in pairs], "hosts": [*hosts]}
        sys.stdout.write(json.dumps({"exit_code": code} | found, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(finding_lines(findings, len({*hosts}))) + "\n")
    sys.stdout.flush()
    if code:
        sys.exit(code)


def check_machine(request: Request, num_hosts: int) -> list[Finding]:
    """Check this machine, which is one of `num_hosts`, without torch."""
    return [
        software.check_packages(),
        *software.check_gpus(),
        *machine.check_machine(num_hosts),
        *storage.check_folders(request.run_dir),
        storage.check_hub(),
    ]
