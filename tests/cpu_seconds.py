"""CPU seconds of tests by folder and of the dearest files, ranks and commands that they start included: `make test`.

Wall time depends on what else the machine does; these much less. A process counts for the test in which it ends.

`cpu_seconds.json` has those of the last run of all tests that has landed: workers take its files in that order, and a
run of all tests that needs a tenth more fails. What it has used itself it leaves in `build/cpu_seconds.json`.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

_NAME, _YARDSTICK = "cpu_seconds", "yardstick"
_NUM_FILES = 25
_FEWEST_SECONDS = 60
"""Of few tests nothing is printed."""
RECORD = Path(__file__).with_suffix(".json")
MOST_TIMES = 1.1
_BEFORE, _FILE, _VERDICT = pytest.StashKey[float](), pytest.StashKey[str](), pytest.StashKey[str]()


def _used() -> float:
    # Of children, too, once they have ended.
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _yardstick() -> float:
    """CPU seconds of what is always the same work: processes that share a core, and its caches, need more for it.

    Half of it is a new process and its pages, as tests of ranks are: a machine can be slow at that alone.
    """
    start = _used()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    found = {number: str(number) for number in range(60_000)}
    sum(map(len, found.values()))
    return _used() - start


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note with each phase of a test what was used since the one before; workers send it with the report."""
    report = yield
    used, stash = _used(), item.config.stash
    report.user_properties.append((_NAME, used - stash.get(_BEFORE, used)))
    if stash.get(_FILE, None) != (file := item.nodeid.partition("::")[0]):
        report.user_properties.append((_YARDSTICK, _yardstick()))
        stash[_FILE], used = file, _used()
    stash[_BEFORE] = used
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with what took longest, so that none is left alone with it; tests/unit comes last.

    What forks ranks is not mixed with it: a process that has run thousands of tests is slow to fork.
    """
    if hasattr(config, "workerinput"):
        last = read_record()["files"]
        # A file that the record does not have yet may be long: it comes first.

        def place(item: pytest.Item) -> tuple[bool, str, float]:
            path = item.nodeid.partition("::")[0]
            folder = _folder(path)
            return folder == "tests/unit", folder, -last.get(path, math.inf)

        items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count from here on."""
    session.config.stash[_BEFORE] = _used()


def _folder(path: str) -> str:
    return "/".join(PurePosixPath(path).parts[:2])


def read_record() -> dict[str, Any]:
    """What the last run that has landed used: in all, and by folder and file."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def _sums(reporter: pytest.TerminalReporter) -> dict[str, Any]:
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    yardsticks = []
    for reports in reporter.stats.values():
        for report in (one for one in reports if isinstance(one, pytest.TestReport)):
            seconds = sum(value for name, value in report.user_properties if name == _NAME)
            yardsticks += [value for name, value in report.user_properties if name == _YARDSTICK]
            path = report.nodeid.partition("::")[0]
            folders[_folder(path)] += seconds
            files[path] += seconds
    yardstick = round(sum(yardsticks) / len(yardsticks), 6) if yardsticks else None
    return {"total": round(folders.total(), 1), "yardstick": yardstick, "folders": folders, "files": files}


def too_much(found: dict[str, Any], record: dict[str, Any]) -> str:
    """Say that a run has used a tenth more than the one before; empty: it has not.

    It counts as it is, and as if the machine had been as busy as then, and the smaller of both decides.
    """
    as_then = 1.0
    if found["yardstick"] and record["yardstick"]:
        as_then = min(1.0, record["yardstick"] / found["yardstick"])
    times = found["total"] * as_then / record["total"]
    if times <= MOST_TIMES:
        return ""
    return (
        f"THE TESTS NEED {times - 1:.0%} MORE CPU SECONDS THAN THOSE OF THE LAST RUN THAT HAS LANDED: "
        f"{found['total'] * as_then:,.0f}, and not {record['total']:,.0f}. Test it at a cheaper level; or, if it is "
        "worth it, say so in the commit, and copy build/cpu_seconds.json to tests/cpu_seconds.json."
    )


def _is_whole(config: pytest.Config) -> bool:
    """Whether all tests of `make test` were asked for."""
    option = config.option
    asked = (option.keyword, option.deselect, option.ignore, option.maxfail, getattr(option, "lf", False))
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and option.markexpr == "not many and not faults"
        and not any(asked)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave the sums of a run of all tests, and fail it if they are too large."""
    config = session.config
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or exitstatus not in (0, 1) or not _is_whole(config):
        return
    found = _sums(reporter)
    if not found["total"]:
        return
    path = config.rootpath / "build" / RECORD.name
    path.parent.mkdir(exist_ok=True)
    rounded = {
        name: {key: round(value, 1) for key, value in sorted(values.items())} if isinstance(values, dict) else values
        for name, values in found.items()
    }
    path.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    config.stash[_VERDICT] = too_much(found, read_record())
    if config.stash[_VERDICT]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums."""
    found = _sums(terminalreporter)
    if found["total"] < _FEWEST_SECONDS:
        return
    terminalreporter.section(f"{found['total']:,.0f} CPU seconds")
    for name, seconds in [*found["folders"].most_common(), *found["files"].most_common(_NUM_FILES)]:
        terminalreporter.line(f"{seconds:7.1f} {name}")
    if verdict := terminalreporter.config.stash.get(_VERDICT, ""):
        terminalreporter.line(verdict, red=True, bold=True)
