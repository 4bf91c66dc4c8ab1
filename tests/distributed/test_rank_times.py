"""ranks.jsonl of real runs shows which rank is slow, who waits for it and who waits for data; alerts say so."""

import os
import platform
import time

from hfdist.data import TokenStream
from hfdist.records import RunFolder, read_lines
from hfdist.run.callbacks.rank_times import RankTimes
from hfdist.tools.alerts import monitor, rank_window
from hfdist.trainer.trainer import Trainer
from tests.distributed.runs import pretrain

STEPS = 4
BUSY_SECONDS = 0.2
"""Of a micro batch, of which a step has four."""
SLEEP_SECONDS = 0.15
"""For a batch."""


def sums(lines, column):
    """By rank."""
    return [sum(of_rank) for of_rank in zip(*(line[column] for line in lines), strict=True)]


def slow_ranks(monkeypatch):
    """Rank 1 computes for long in the first steps, and rank 0 waits for its data in the last ones."""
    step, loader = Trainer.training_step, TokenStream.loader

    def training_step(self, *more, **named):
        end = time.thread_time() + BUSY_SECONDS
        while os.environ["RANK"] == "1" and self.state.global_step < STEPS and time.thread_time() < end:
            pass
        return step(self, *more, **named)

    def slow_loader(self, *more, **named):
        for number, batch in enumerate(loader(self, *more, **named)):
            if os.environ["RANK"] == "0" and number >= 4 * STEPS:
                time.sleep(SLEEP_SECONDS)
            yield batch

    monkeypatch.setattr(Trainer, "training_step", training_step)
    monkeypatch.setattr(TokenStream, "loader", slow_loader)


def test_a_slow_rank_is_busy_and_the_other_one_waits(tmp_path, monkeypatch):
    slow_ranks(monkeypatch)
    monkeypatch.setattr(monitor, "WINDOW_SECONDS", 0.5)
    monkeypatch.setattr(monitor, "WINDOW_LINES", 2)
    # Of a step's time. Computing is CPU time, of which a rank beside other tests gets little in a step.
    monkeypatch.setattr(rank_window, "_SLOW_SHARE", 0.08)
    length, command = f"train.max_steps={2 * STEPS}", f"report.alert_command='tee -a {tmp_path}/told'"
    fixed = ("strategy=ddp", "train.micro_batch_size=1", f"train.eval_every={STEPS}")
    pretrain(tmp_path, 2, *fixed, length, command)
    lines = read_lines(RunFolder(tmp_path).ranks)
    assert [line["step"] for line in lines] == list(range(1, 2 * STEPS + 1))
    metrics = {line["step"]: line for line in read_lines(RunFolder(tmp_path).metrics) if "loss" in line}
    for line in lines:
        assert abs(line["step_seconds"][0] - metrics[line["step"]]["step_seconds"]) < 1e-6
        assert all(bytes_used > 2**26 for bytes_used in line["peak_bytes"])
    computing, loading = lines[1:STEPS], lines[STEPS:]
    busy = 4 * BUSY_SECONDS * len(computing)
    compute, wait = sums(computing, "compute_seconds"), sums(computing, "wait_seconds")
    assert compute[1] > busy
    assert wait[0] > wait[1] + busy / 2
    data, wait = sums(loading, "data_seconds"), sums(loading, "wait_seconds")
    asleep = 4 * SLEEP_SECONDS * len(loading)
    assert data[0] > asleep
    assert data[1] < asleep / 2
    assert wait[1] > asleep / 2
    alerts = [line for line in read_lines(RunFolder(tmp_path).events) if line["event"] == "alert"]
    assert [(one["kind"], one["rank"], one["host"]) for one in alerts] == [
        ("slow_rank", 1, platform.node()), ("data_wait", 0, platform.node())
    ]  # fmt: skip
    assert sorted(line["kind"] for line in read_lines(tmp_path / "told")) == ["data_wait", "slow_rank"]
    assert not any(key.startswith("alert/") for line in read_lines(RunFolder(tmp_path).metrics) for key in line)


def test_stages_of_a_pipeline_and_steps_that_are_not_logged(tmp_path, monkeypatch):
    gathers, gather = [], RankTimes._gather

    def counted(self):
        gathers.extend(self._steps[:1])
        assert set(gathers) <= {3, 6}
        gather(self)

    monkeypatch.setattr(RankTimes, "_gather", counted)
    pretrain(tmp_path, 2, "strategy=pipeline", "train.max_steps=7", "report.log_every=3")
    lines = read_lines(RunFolder(tmp_path).ranks)
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        parts = zip(line["data_seconds"], line["compute_seconds"], line["wait_seconds"], strict=True)
        assert len(line["step_seconds"]) == 2
        for whole, of_rank in zip(line["step_seconds"], parts, strict=True):
            assert abs(sum(of_rank) - whole) < 1e-5
