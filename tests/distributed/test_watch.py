"""Real ranks that die, hang, loop or take other steps are found in time, in one line; slow ones are left alone."""

import signal

import pytest

from hfdist.records import RunFolder, State, read_lines, read_run
from hfdist.tools.explain_hang import explain
from tests.distributed import injected_faults
from tests.distributed.injected_faults import Ranks

pytestmark = pytest.mark.distributed

HEARTBEAT_SECONDS = 2.0
ENDLESS = ["train.max_steps=5000", "train.global_batch_size=6", "train.micro_batch_size=1",
           f"watch.heartbeat_seconds={HEARTBEAT_SECONDS}"]  # fmt: skip


def found(ranks, codes):
    """Check what every incident must leave, and give its line."""
    assert codes == [6] * len(codes), ranks.said
    assert "Traceback" not in ranks.said
    (report,) = ranks.run_dir.glob("watch/*/report.txt")
    assert report.stat().st_mtime - ranks.began < HEARTBEAT_SECONDS + 5
    line = report.read_text().strip()
    assert ranks.said.count(line) == 1, ranks.said
    record = read_run(ranks.run_dir)
    assert (record.state, record.exit_code, record.error) == (State.failed, 6, line)
    lost, end = read_lines(RunFolder(ranks.run_dir).events)[-2:]
    assert (lost["event"], lost["found"]) == ("lost_rank", line)
    assert (end["event"], end["exit_code"], end["error"]) == ("end", 6, line)
    return line


def stacks(ranks):
    return {int(path.stem[-5:]): path.read_text() for path in ranks.run_dir.glob("watch/*/rank-*.txt")}


@pytest.mark.parametrize(
    ("number", "victim"),
    [
        (signal.SIGSTOP, 0),
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.faults),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.faults),
    ],
)
def test_a_rank_that_is_stopped_or_killed(tmp_path, cache_dir, number, victim):
    ranks = Ranks(tmp_path, 3, ENDLESS, injected_faults.none)
    ranks.wait_for_steps(3)
    ranks.send(number, victim)
    line = found(ranks, ranks.end(but=victim))
    assert "dead, stopped or cut off" in line
    # Without rank 0, who has heard all, each rank speaks for itself.
    assert ("ranks 0, 2 wait for rank 1 (on" if victim == 1 else "waits for rank 0 (on") in line
    assert sorted(stacks(ranks)) == [rank for rank in range(3) if rank != victim]
    explained = explain(ranks.run_dir)
    state = "is stopped by a signal" if number is signal.SIGSTOP else "died without a word"
    assert explained.verdict.startswith(f"rank {victim} (on ")
    assert state in explained.verdict
    assert victim in explained.waits[-1].awaited
    for text in stacks(ranks).values():
        assert "last collectives: gloo:" in text
        assert "pretrain.py" in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (injected_faults.data_end_in_a_loop, "rank 0 waits for rank 1 (on "),
        pytest.param(injected_faults.collective_is_skipped, "ranks 0-1 (on ", marks=pytest.mark.faults),
        pytest.param(injected_faults.step_holds_the_interpreter, "rank 0 waits for rank 1", marks=pytest.mark.faults),
    ],
)
def test_a_rank_that_is_astray(tmp_path, cache_dir, fault, words):
    ranks = Ranks(tmp_path, 2, ENDLESS, fault)
    line = found(ranks, ranks.end(but=1 if fault is injected_faults.step_holds_the_interpreter else None))
    assert words in line
    if fault is injected_faults.data_end_in_a_loop:
        assert "made no progress" in line
        assert "in endless" in stacks(ranks)[1]
        verdict = explain(ranks.run_dir).verdict
        assert "for rank 1, which never came to it: runs its own code" in verdict
        assert "/injected_faults.py:" in verdict
    if fault is injected_faults.collective_is_skipped:
        assert "wait for each other" in line
        assert "rank 0 is in barrier of distributed/injected_faults.py:" in line
        assert "rank 1 is in gloo:all_reduce" in line
        verdict = explain(ranks.run_dir).verdict
        assert "where rank 0 called barrier at" in verdict
        assert "one side has left a collective out" in verdict


def test_slow_ranks_raise_no_alarm(tmp_path, cache_dir):
    """Each pause is longer than the heartbeat; and each step of one rank takes five times as long as on the other."""
    pauses = ["train.max_steps=12", "checkpoint=default", "checkpoint.every=6", "train.eval_every=6"]
    ranks = Ranks(tmp_path, 2, [*pauses, f"watch.heartbeat_seconds={HEARTBEAT_SECONDS}"], injected_faults.slow)
    assert ranks.end() == [0, 0], ranks.said
    assert ranks.steps == 12
    assert not (ranks.run_dir / "watch").exists()


def test_a_rank_that_ends_with_an_error_of_its_own_raises_no_alarm(tmp_path, cache_dir):
    ranks = Ranks(tmp_path, 3, ENDLESS, injected_faults.data_are_bad)
    assert ranks.end() == [3, 3, 3], ranks.said
    assert ranks.said.count("[rank 1] Data error: it is bad") == 1
    assert ranks.said.count("rank 1 has ended with exit code 3, and has said why") == 1
    assert "Peer lost" not in ranks.said
    assert read_run(ranks.run_dir).exit_code == 3
    assert [event["event"] for event in read_lines(RunFolder(ranks.run_dir).events)] == ["start", "end"]
    assert not stacks(ranks)
