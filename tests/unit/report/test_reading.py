"""What a report reads: only what is new, whatever is damaged, and fewer points that keep every spike."""

import json
import os

import pytest

from hfdist.tools.report.reading.downsample import keep_extremes, means
from hfdist.tools.report.reading.follow import Follower
from hfdist.tools.report.reading.rank_steps import RankSteps
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped_lines, number
from tests.unit.report.folders import event, rank_line, training_line, write_lines, write_run


class Lines(list):
    """Those that a follower has taken, and how often it began anew."""

    def __init__(self, path):
        super().__init__()
        self.follower = Follower(path, self.clear, self.append)


def test_only_new_whole_lines_are_taken(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = Lines(path)
    assert not lines.follower.read()
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert lines.follower.read()
    assert not lines.follower.read()
    assert lines == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    lines[0] = "taken before"
    assert lines.follower.read()
    assert lines == ["taken before", {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("more", [[], [{"step": 90 + number} for number in range(60)]], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path, more):
    path = tmp_path / "lines.jsonl"
    lines = Lines(path)
    write_lines(path, [{"step": step} for step in range(40)])
    lines.follower.read()
    unfinished = tmp_path / "lines.tmp"
    write_lines(unfinished, [{"step": 0}, *more])
    unfinished.replace(path)
    assert lines.follower.read()
    assert lines == [{"step": 0}, *more]


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n[1]\nnull\n' + b"[" * 100_000 + b'\n{"step": NaN}\n{"step": 2}\n')
    lines = Lines(path)
    assert lines.follower.read()
    assert [line["step"] for line in lines if line["step"] == line["step"]] == [1, 2]


def test_numbers():
    assert [number(value) for value in (1, 2.5, True, "1", None, float("nan"), float("inf"), 10**400, 1e-300)] == [
        1.0, 2.5, None, None, None, None, None, None, 0.0,
    ]  # fmt: skip


def test_a_secret_of_several_lines_or_at_the_cut_is_masked():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
    token = "hf_" + "AbCdEfGhIj" * 3
    for text, shown in (
        (f"a\n{key}\nb", "a\n***\nb"),
        (f"a\n{key[:50]}", "a\n***"),
        (f"{'x ' * 40}{token} b", f"{'x ' * 40}*** b"),
        (f"{'x ' * 50}{token}", f"{'x ' * 50} ..."),
    ):
        assert escaped_lines(text, 100) == shown


@pytest.mark.parametrize("most", [8, 100, 640])
def test_extremes_survive(most):
    spikes = {31_234: 9.5, 31_235: -3.0, 77_777: 12.0}
    points = [(float(step), spikes.get(step, 2 + (step * 7919 % 100) / 1000)) for step in range(1, 100_001)]
    kept = keep_extremes(points, most)
    assert len(kept) <= most
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {(31_235.0, -3.0), (77_777.0, 12.0)} <= {*kept}
    if most >= 100:
        # Of each stretch, not of the whole alone.
        assert (31_234.0, 9.5) in kept
    assert len(means(points, most)) <= most


def test_few_points_are_all_kept_and_gaps_stay():
    points = [(1.0, 2.0), (2.0, None), (3.0, 1.0)]
    assert keep_extremes(points, 8) == points
    long = [(float(step), None if 4000 <= step < 6000 else 1.0) for step in range(10_000)]
    kept = keep_extremes(long, 100)
    assert {4000 <= x < 6000 for x, y in kept if y is None} == {True}
    assert {y for x, y in kept if not 4000 <= x < 6000} == {1.0}


def test_of_keys_that_no_run_writes_nothing_is_kept(tmp_path):
    long, pools = "rewards/" + "a" * 10_000, {f"data/pool-{number}/share": 0.1 for number in range(2000)}
    run = RunFiles(write_run(tmp_path, lines=[training_line(1) | {long: 1.0, "data/a/other": 1.0} | pools]))
    run.read()
    assert run.metrics.figures == {}
    assert "a" not in run.metrics.shares
    assert len(run.metrics.shares) == 1000


def test_a_run_of_one_step_or_none(tmp_path):
    for lines in ([], [training_line(1)]):
        run = RunFiles(write_run(tmp_path / str(len(lines)), lines=lines))
        assert run.read()
        assert not run.read()
        assert len(run.metrics.steps) == len(lines)


def test_tokens_and_time_of_a_step_between_two_lines(tmp_path):
    lines = [{"step": step, "loss": 1.0, "tokens": 100 * step, "step_seconds": 2.0} for step in (10, 20, 30)]
    run = RunFiles(write_run(tmp_path, lines=lines))
    run.read()
    assert [run.metrics.at_step(run.metrics.tokens, step) for step in (0, 5, 10, 25, 99)] == [0, 500, 1000, 2500, 3000]
    assert run.metrics.seconds == [2.0, 22.0, 42.0]


def test_steps_that_are_done_again_replace_those_of_before(tmp_path):
    run = RunFiles(write_run(tmp_path, events=[event("start", 1)]))
    run.read()
    kept = [training_line(step) for step in range(1, 11)]
    write_lines(tmp_path / "metrics.tmp", [*kept, training_line(11, loss=7.0)])
    (tmp_path / "metrics.tmp").replace(tmp_path / "metrics.jsonl")
    assert run.read()
    assert run.metrics.steps == list(range(1, 12))
    assert run.metrics.curve("loss")[-1] == (11.0, 7.0)


def test_ranks_of_a_long_run_stay_few():
    steps = RankSteps()
    for step in range(1, 2001):
        steps.add(rank_line(step, slow={2} if step in (1, 1500) else ()))
    assert len(steps.stretches) <= 97
    assert sum(stretch.num_lines for stretch in steps.stretches) == 2000
    assert steps.stretches[0].first_step == 1
    total = steps.total()
    assert total.means("compute_seconds")[0] == pytest.approx(0.05)
    # Without the first line, however many there are.
    assert total.means("compute_seconds")[2] == pytest.approx(0.05 + 0.2 / 1999)
    assert total.peak_bytes == [400_000_000 + rank for rank in range(4)]


def test_a_rank_without_a_number_is_not_known():
    steps = RankSteps()
    for step in (1, 2, 3):
        steps.add(rank_line(step) | {"wait_seconds": [None] * 4, "data_seconds": [None, 0.1]})
    total = steps.total()
    assert total.means("wait_seconds") == [None] * 4
    assert total.means("data_seconds") == [None, pytest.approx(0.1)]
    assert total.busy() == [pytest.approx(value) for value in (0.05, 0.15, 0.05, 0.05)]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [1, {"ph": "X"}]}', "{" * 10**5]
)
def test_a_damaged_timeline_has_no_spans(tmp_path, content):
    write_run(tmp_path)
    (tmp_path / "timeline.json").write_text(content)
    run = RunFiles(tmp_path)
    assert run.read()
    assert run.spans == []


def test_a_pipe_in_place_of_a_file_is_not_read(tmp_path):
    """It would not end; nobody writes into it."""
    for name in ("run.json", "timeline.json", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert not RunFiles(tmp_path).read()


def test_nothing_in_the_folder_is_touched(tmp_path):
    write_run(tmp_path, ranks=[rank_line(1)])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    RunFiles(tmp_path).read()
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 1
