"""CPU seconds of tests by folder and of the dearest files, ranks and commands that they start included: `make test`.

Wall time depends on what else the machine does; these hardly do. A process counts for the test in which it ends.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

_NAME = "cpu_seconds"
_NUM_FILES = 25
_FEWEST_SECONDS = 60
"""Of few tests nothing is printed."""
_BEFORE = pytest.StashKey[float]()


def _used() -> float:
    # Of children, too, once they have ended.
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note with each phase of a test what was used since the one before; workers send it with the report."""
    report = yield
    used = _used()
    report.user_properties.append((_NAME, used - item.config.stash.get(_BEFORE, used)))
    item.config.stash[_BEFORE] = used
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count from here on."""
    session.config.stash[_BEFORE] = _used()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums."""
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            seconds = sum(value for name, value in report.user_properties if name == _NAME)
            path = PurePosixPath(report.nodeid.partition("::")[0])
            folders["/".join(path.parts[:2])] += seconds
            files[str(path)] += seconds
    if folders.total() < _FEWEST_SECONDS:
        return
    terminalreporter.section(f"{folders.total():,.0f} CPU seconds")
    for name, seconds in [*folders.most_common(), *files.most_common(_NUM_FILES)]:
        terminalreporter.line(f"{seconds:7.1f} {name}")
