"""The queue for a GPU: its order, its limits, what it goes on with, and what a failing line leaves."""

import time

from hfdist.records import read_lines
from proofs.gpu_queue import LINES, Line, Outcome, due, table, work

ABC = [Line(name, 60.0, ()) for name in "abc"]


def names(lines):
    return [line.name for line in lines]


def test_lines_run_in_their_order_and_are_noted_as_each_ends(tmp_path):
    path, seen = tmp_path / "lines.jsonl", []

    def measure(line, until):
        seen.append((line.name, len(read_lines(path))))
        assert until - time.monotonic() <= line.seconds
        if line.name == "b":
            raise ValueError("no | such kernel")
        return Outcome({"tokens/s": 12.5}, "")

    assert work(ABC, path, "card", time.monotonic() + 100, measure, lambda: seen.append("page")) == 1
    assert seen == [("a", 0), "page", ("b", 1), "page", ("c", 2), "page"]
    assert table(ABC, path).splitlines()[3].startswith("| b | failed: ValueError: no / such kernel | card |")
    assert "tokens/s 12.5" in table(ABC, path)


def test_the_same_command_goes_on_with_what_has_no_figure_for_this_card(tmp_path):
    path = tmp_path / "lines.jsonl"
    fails = lambda line, until: Outcome({}, "not done after 3 s")  # noqa: E731
    works = lambda line, until: Outcome({"peak GiB": 1.0}, "")  # noqa: E731
    work(ABC[:1], path, "card", time.monotonic() + 100, fails)
    assert names(due(ABC, path, "card")) == ["b", "c", "a"]
    work(ABC[:2], path, "card", time.monotonic() + 100, works)
    assert names(due(ABC, path, "card")) == ["c"]
    assert names(due(ABC, path, "another")) == ["a", "b", "c"]
    assert "| c | not measured | - | - |" in table(ABC, path)
    assert "failed" not in table(ABC, path)


def test_no_line_begins_that_has_no_time_left(tmp_path):
    path, limits = tmp_path / "lines.jsonl", []

    def measure(line, until):
        limits.append(until)
        return Outcome({}, "not done")

    end = time.monotonic() + 40
    assert work(ABC, path, "card", end, measure) == 3
    assert limits == [end] * 3
    assert work(ABC, path, "card", time.monotonic() + 20, measure) == 3
    assert len(limits) == 3


def test_each_line_has_a_name_of_its_own():
    assert len({line.name for line in LINES}) == len(LINES)
