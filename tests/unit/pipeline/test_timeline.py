import json
import time

import pytest
import torch

from hfdist.pipeline.timeline import Action, Event, Recorder, write_chrome_trace
from hfdist.run.callbacks.metrics import idle_share
from hfdist.tools.report.drawing.schedule import busy_share
from hfdist.tools.report.reading.run_files import RunFiles

CPU = torch.device("cpu")


def event(rank, action, start, stop, *, stage=None, microbatch=0):
    stage = rank if stage is None else stage
    seconds = {"start_seconds": start, "stop_seconds": stop}
    return Event(rank=rank, stage=stage, action=action, microbatch=microbatch, **seconds)


TWO_RANKS = [
    event(0, Action.forward, 1.0, 2.0),
    event(0, Action.send, 2.0, 2.5),
    event(1, Action.wait, 1.0, 2.5),
    event(1, Action.forward, 2.5, 3.5),
    event(1, Action.backward_input, 3.5, 4.0),
    event(1, Action.backward_weight, 4.0, 5.0),
]


# What a recorder measures


def test_spans_are_measured_from_the_zero_in_order():
    recorder = Recorder(rank=3, device=CPU)
    with recorder.span(Action.forward, stage=1, microbatch=0):
        "Not started: nothing is recorded."
    assert recorder.stop() == []
    for microbatch in (4, 5):
        # A new start forgets the step before.
        began = time.perf_counter()
        recorder.start()
        with recorder.span(Action.forward, stage=1, microbatch=microbatch):
            time.sleep(0.03)
        time.sleep(0.02)
        with recorder.span(Action.send, stage=1, microbatch=microbatch):
            time.sleep(0.01)
        with pytest.raises(ZeroDivisionError), recorder.span(Action.forward, stage=0, microbatch=microbatch):
            raise ZeroDivisionError
        longest_seconds = time.perf_counter() - began
    forward, send = events = recorder.stop()
    assert forward[:4] == (3, 1, Action.forward, 5)
    assert send[:4] == (3, 1, Action.send, 5)
    assert forward.start_seconds >= 0
    assert forward.stop_seconds - forward.start_seconds >= 0.03
    assert send.start_seconds - forward.stop_seconds >= 0.02
    assert send.stop_seconds - send.start_seconds >= 0.01
    assert send.stop_seconds <= longest_seconds
    with recorder.span(Action.forward, stage=0, microbatch=2):
        "Stopped: nothing more is recorded."
    assert recorder.stop() == events


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_spans_last_as_long_as_the_work_and_not_as_its_launch():
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    recorder = Recorder(rank=0, device=device)
    recorder.start()
    began = time.perf_counter()
    for microbatch in range(2):
        with recorder.span(Action.forward, stage=0, microbatch=microbatch):
            for _ in range(50):
                matrix @ matrix
    launched_seconds = time.perf_counter() - began
    first, second = recorder.stop()
    waited_seconds = time.perf_counter() - began
    assert 0 <= first.start_seconds < first.stop_seconds <= second.start_seconds < second.stop_seconds
    assert launched_seconds < second.stop_seconds < waited_seconds + 0.001


# What is computed from events


def test_the_bubble_is_the_share_of_the_schedule_without_computing(tmp_path):
    # From 1 s to 5 s on two ranks: 8 s, of which rank 0 computes 1 s and rank 1 2.5 s.
    assert idle_share(TWO_RANKS) == pytest.approx(1 - 3.5 / 8)
    write_chrome_trace(TWO_RANKS, tmp_path / "timeline.json")
    run = RunFiles(tmp_path)
    run.read()
    assert busy_share(run.spans) == pytest.approx({0: 1 / 4, 1: 2.5 / 4})


def test_the_chrome_trace_holds_every_event_in_microseconds(tmp_path):
    written = json.loads(write_chrome_trace(TWO_RANKS, tmp_path / "trace.json").read_text())["traceEvents"]
    names = {line["tid"]: line["args"]["name"] for line in written if line["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    complete = [line for line in written if line["ph"] == "X"]
    assert [(line["pid"], line["tid"], line["ts"], line["dur"]) for line in complete] == [
        (0, one.rank, one.start_seconds * 1e6, (one.stop_seconds - one.start_seconds) * 1e6) for one in TWO_RANKS
    ]
    assert complete[-1]["name"] == "weight gradient 0"
    assert complete[-1]["args"] == {"stage": 1, "microbatch": 0}


def test_actions_one_after_the_other_do_not_overlap_in_the_trace(tmp_path):
    # In floating point, third * 3 * 1e6 + third * 1e6 and third * 4 * 1e6 need not be the same number.
    third = 1 / 3e4
    events = [event(0, Action.forward, third * i, third * (i + 1), microbatch=i) for i in range(200)]
    written = json.loads(write_chrome_trace(events, tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [line for line in written if line["ph"] == "X"]
    ends = [round(1e3 * line["ts"]) + round(1e3 * line["dur"]) for line in complete]
    assert ends[:-1] == [round(1e3 * line["ts"]) for line in complete[1:]]
