"""What each test file costs and covers alone: `python -m proofs.coverage_table tests/unit` (needs pytest-cov).

Prints for each file its tests, the CPU seconds of its process and of those that it waited for, its lines, the lines of
hfdist/ that it runs, and how many of these no other of the files runs. Ranks that a test forks count as well.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from coverage import CoverageData

SETTINGS = """\
[run]
source = hfdist
parallel = true
patch = fork, _exit
"""


class Costs:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Around one test, with its fixtures."""
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            path = item.nodeid.partition("::")[0]
            self.tests[path] += 1
            self.seconds[path] += sum(os.times()[:4]) - before


def lines_by_file(data: CoverageData) -> tuple[Counter[str], Counter[str]]:
    """Of each test file: lines of hfdist/ that it runs, and those that it alone runs."""
    covered: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for path in data.measured_files():
        files_of_line = defaultdict(set)
        for line, contexts in data.contexts_by_lineno(path).items():
            # Without a context: what imports run.
            files_of_line[line] |= {context.partition("::")[0] for context in contexts if context}
        for files in files_of_line.values():
            covered.update(files)
            if len(files) == 1:
                alone.update(files)
    return covered, alone


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, and print the table, the dearest first."""
    with tempfile.TemporaryDirectory() as name:
        settings, file, costs = Path(name) / "settings", Path(name) / "data", Costs()
        settings.write_text(SETTINGS)
        os.environ["COVERAGE_FILE"] = str(file)
        options = ["-q", "--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        code = pytest.main([*options, *arguments], plugins=[costs])
        data = CoverageData(str(file))
        data.read()
        covered, alone = lines_by_file(data)
    sys.stdout.write(
        "| file | tests | CPU seconds | lines | lines of hfdist/ | it alone |\n|---|---|---|---|---|---|\n"
    )
    for path, seconds in costs.seconds.most_common():
        lines = len(Path(path).read_text(encoding="utf-8").splitlines())
        cells = (path, costs.tests[path], f"{seconds:.1f}", lines, covered[path], alone[path])
        sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
