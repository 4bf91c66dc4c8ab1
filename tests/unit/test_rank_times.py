"""The clock of a rank tells computing, loading and waiting apart; peaks are of the time since the last line."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.records import RankColumn, RunFolder, read_lines
from hfdist.run import peak_memory
from hfdist.run.callbacks.plan_grader import PlanGrader
from hfdist.run.callbacks.rank_times import RankTimes
from hfdist.run.peak_memory import PeakMemory, largest_peaks
from hfdist.run.rank_summary import RankSummary
from hfdist.tools.report.reading.rank_steps import RankSteps
from hfdist.trainer.step import step_clock
from hfdist.trainer.step.step_clock import StepClock, StepTimes
from hfdist.trainer.step.throughput import Throughput

CPU = torch.device("cpu")


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def batches():
    for number in range(2):
        compute(0.01)
        time.sleep(0.04)
        yield number


@pytest.fixture(params=["schedstat", "none"])
def clock(request, tmp_path, monkeypatch):
    if request.param == "none":
        monkeypatch.setattr(step_clock, "_SCHEDSTAT", tmp_path / "none")
    clock = StepClock(CPU)
    clock.restart()
    return clock


def test_each_second_is_counted_where_it_went(clock):
    assert list(clock.loading(batches())) == [0, 1]
    compute(0.1)
    with clock.paused():
        compute(0.05)
        time.sleep(0.05)
    # In two steps; what is computed around it is no wait.
    time.sleep(0.07)
    times = clock.read(2)
    assert times.data >= 0.05
    assert 0.05 <= times.compute < times.step
    assert times.wait >= 0.03
    assert times.data + times.compute + times.wait == pytest.approx(times.step, abs=1e-3)
    # The pause is of none of them, and a reading begins anew.
    assert clock.read(1).step < 0.05


def test_without_a_core_a_rank_is_busy(tmp_path, monkeypatch):
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 1000000000 3\n")
    monkeypatch.setattr(step_clock, "_SCHEDSTAT", schedstat)
    clock = StepClock(CPU)
    clock.restart()
    schedstat.write_text("0 1050000000 4\n")
    time.sleep(0.1)
    assert 0.05 <= clock.read(1).compute < 0.1


def test_a_loader_without_a_core_is_not_computing(tmp_path, monkeypatch):
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 1000000000 3\n")
    monkeypatch.setattr(step_clock, "_SCHEDSTAT", schedstat)
    clock = StepClock(CPU)
    clock.restart()

    def batch():
        schedstat.write_text("0 1080000000 4\n")
        time.sleep(0.08)
        yield 0

    assert list(clock.loading(batch())) == [0]
    time.sleep(0.1)
    times = clock.read(1)
    assert times.compute < 0.05
    assert times.wait >= 0.09


def test_a_gpu_works_behind_its_callers_back():
    times = StepClock(torch.device("cuda")).read(1)
    assert (times.compute, times.wait) == (None, None)


@pytest.mark.skipif(not Path(peak_memory._RESET).exists(), reason="the system cannot reset its count")
def test_a_peak_is_of_the_time_since_the_last_reading():
    def use(num_bytes):
        held = bytearray(b"1") * num_bytes
        return memory.read() if held else 0

    memory = PeakMemory(CPU)
    most = use(2**27)
    after = memory.read()
    least = memory.read()
    assert most - least > 2**26
    # The memory was given back after the reading.
    assert after >= least
    assert largest_peaks(CPU)["host"] >= most


def begin(folder, step, used):
    writer = RankTimes(RunFolder(folder).ranks, Throughput(CPU), lambda line: used.append(line) or False)
    writer.on_train_begin(TrainingArguments(str(folder), use_cpu=True), TrainerState(global_step=step), None)
    return writer


def log(writer, step, **logs):
    arguments = TrainingArguments(str(writer._path.parent), use_cpu=True)
    writer._throughput.of_rank = StepTimes(1.0, 0.25, None, 0.5)
    writer.on_log(arguments, TrainerState(global_step=step), TrainerControl(), logs=logs)


def test_a_line_is_written_at_the_next_step_and_moves_with_its_step(tmp_path):
    used = []
    writer = begin(tmp_path, 0, used)
    log(writer, 1, loss=1.0, step_seconds=1.0)
    # A line of the user's, of one rank alone.
    log(writer, 1, loss=1.0)
    assert read_lines(RunFolder(tmp_path).ranks) == []
    writer.on_step_end(None, TrainerState(global_step=2), None)
    log(writer, 2, loss=1.0, step_seconds=1.0)
    writer.on_train_end(None, TrainerState(global_step=2), None)
    lines = read_lines(RunFolder(tmp_path).ranks)
    assert lines == used
    assert [line["step"] for line in lines] == [1, 2]
    assert set(lines[0]) == {"step", *(column.value for column in RankColumn)}
    assert [lines[0][name] for name in ("step_seconds", "data_seconds", "compute_seconds", "wait_seconds")] == [
        [1.0], [0.25], [None], [0.5]
    ]  # fmt: skip
    assert lines[0]["peak_bytes"][0] > 2**20
    log(writer, 3, loss=None, skipped=True, step_seconds=1.0)
    writer.on_rollback(TrainerState(global_step=1))
    assert [line["step"] for line in read_lines(RunFolder(tmp_path).ranks)] == [1]


def figures_of(num_ranks, step):
    """Rank 7 takes longer than the others, and each rank longer than the one before, by a little."""
    seconds = 1 + np.arange(num_ranks) / 1e4 + step / 100
    seconds[7] += 1
    return np.vstack([seconds, seconds / 4, np.full((2, num_ranks), np.nan), 1e6 + np.arange(num_ranks) + step])


@pytest.mark.parametrize("num_ranks", [64, 65, 1024])
def test_a_line_of_many_ranks_is_a_summary_and_loses_no_step(num_ranks):
    summary = RankSummary(num_ranks)
    num_lines = 2 * num_ranks // 16 + 2
    lines = [summary.line(2 * n, 2, figures_of(num_ranks, n), with_ranks=n == 3) for n in range(num_lines)]
    whole = [n for n, line in enumerate(lines) if "step_seconds" in line]
    if num_ranks == 64:
        assert whole == list(range(num_lines))
        assert all("quantiles" not in line for line in lines)
        return
    interval = -(-num_ranks // 16)
    assert whole == sorted({3, *range(0, num_lines, interval)})
    assert "compute_seconds" not in lines[1]["quantiles"]
    low, *_, high = lines[1]["quantiles"]["step_seconds"]
    assert (low, high) == (1.01, 2.0107)
    assert next(iter(lines[1]["highest"]["step_seconds"].items())) == ("7", 2.0107)
    assert lines[1]["highest"]["peak_bytes"][str(num_ranks - 1)] == 1e6 + num_ranks
    # Each line with all ranks has the mean of the steps since the one before, and their highest peak.
    for before, n in zip([-1, *whole], whole, strict=False):
        mean = np.mean([figures_of(num_ranks, other)[0] for other in range(before + 1, n + 1)], axis=0)
        assert lines[n]["step_seconds"] == pytest.approx(mean.tolist(), abs=1e-6)
        assert lines[n]["peak_bytes"] == figures_of(num_ranks, n)[-1].tolist()
        assert lines[n]["steps"] == 2 * (n - before)
    assert len(summary.take()["step_seconds"]) == num_ranks
    assert summary.take() == {}


def test_bytes_of_a_step_do_not_grow_with_ranks():
    def size(num_ranks):
        summary = RankSummary(num_ranks)
        lines = [summary.line(n, 1, figures_of(num_ranks, n)) for n in range(1, num_ranks // 16 + 1)]
        return len(json.dumps(lines)) / len(lines)

    assert size(4096) < 1.1 * size(256) < 2000


def test_the_report_takes_the_lines_with_all_ranks():
    summary, steps = RankSummary(128), RankSteps()
    for n in range(1, 20):
        steps.add(summary.line(n, 1, figures_of(128, n)))
    # The first line, and then one of eight.
    assert [(stretch.first_step, stretch.num_ranks) for stretch in steps.stretches] == [(1, 128), (9, 128), (17, 128)]


def many_ranks_lines():
    """Of a run of 7 steps that ends before all ranks stand in a second line; the first step takes longest."""
    summary, lines = RankSummary(128), []
    for n in range(1, 8):
        figures = figures_of(128, n)
        # Each step another rank is slow.
        figures[0] = 1.0
        figures[0, n] = 2.0
        figures[0] += 30 * (n == 1)
        lines.append(summary.line(n, 1, figures))
    return [*lines, {"step": 7, **summary.take()}]


def test_the_report_of_a_short_run_leaves_its_first_step_out_and_weighs_lines_by_their_steps():
    steps = RankSteps()
    for line in many_ranks_lines():
        steps.add(line)
    assert steps.total().means("step_seconds")[2:10] == pytest.approx([*[7 / 6] * 6, 1.0, 1.0], abs=1e-5)
    for number_of, seconds in ((1, 4.0), (3, 2.0)):
        steps.add({"step": 7 + number_of, "steps": number_of, "step_seconds": [seconds] * 128})
    mean = (6 + 1 * 4.0 + 3 * 2.0) / 10
    assert steps.total().means("step_seconds")[100] == pytest.approx(mean)


def test_the_grade_of_many_ranks_is_of_the_slowest_of_each_step(tmp_path):
    folder = RunFolder(tmp_path)
    folder.ranks.write_text("".join(f"{json.dumps(line)}\n" for line in many_ranks_lines()))
    grader = PlanGrader(None, folder, None, runtime_bytes=None, recorder=None, steps=tmp_path / "steps")
    measured = grader._measure([{}] * 128, TrainerState(global_step=7))
    assert measured.step_seconds == 2.0
    # The last rank has the highest peak.
    assert (measured.rank, measured.held.peak) == (127, 1e6 + 127 + 7)


def test_mfu_of_documents_counts_their_own_squares(monkeypatch):
    throughput = Throughput(CPU)
    throughput.see_documents([torch.arange(8)[None]])
    assert "mfu" not in throughput.read(1)
    monkeypatch.setattr(throughput, "_peak_flops", 1e3)
    throughput.start(0, 0, lambda length, _: 5.0 + 2.0 * length, num_devices=1)
    throughput.flops_per_token(8)
    for lengths, squares in (((8,), 64), ((3, 4, 1), 26)):
        throughput.see_documents([torch.cat([torch.arange(n) for n in lengths])[None]])
        throughput.tokens += 8
        figures = throughput.read(1)
        ratio = (5 + 2 * squares / 8) / (5 + 2 * 8)
        assert figures["mfu_documents"] / figures["mfu"] == pytest.approx(ratio)
    throughput.tokens += 8
    assert "mfu_documents" not in throughput.read(1)
