"""The measured schedule of one optimizer step: recorded on each rank, gathered, and written as a Chrome trace.

The clocks of two machines differ, so each rank counts from a zero of its own: a barrier at the start of the step. Rows
of the picture line up as well as ranks leave that barrier together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hfdist.collectives import gather_json


class Action(StrEnum):
    """What a rank does at a time. The report knows it by its name, and the trace has the value as its words."""

    forward = "forward"
    backward = "full backward"
    backward_input = "input gradient"
    backward_weight = "weight gradient"
    send = "send"
    wait = "wait to receive"


class Event(NamedTuple):
    """One action of one rank, in seconds since the barrier at the start of the step."""

    rank: int
    stage: int
    action: Action
    microbatch: int
    start_seconds: float
    stop_seconds: float


_Mark = float | torch.cuda.Event
"""A time by the clock, or on a GPU an event of its stream."""


class _Span(NamedTuple):
    """One action of this rank."""

    stage: int
    action: Action
    microbatch: int
    start: _Mark
    stop: _Mark


class Recorder:
    """One rank's events of one step. It records between `start()` and `stop()`, and costs next to nothing otherwise.

    Args:
        rank: place of this rank in its pipeline.
        device: of this rank; on a GPU, times are taken on its current stream by CUDA events.
        replica: the ranks of the pipeline whose events `around_step` keeps.
        title: what runs, for people.
        formula: the idle share that the schedule would have with equal stages, from 0 to 1.
    """

    def __init__(
        self, *, rank: int, device: torch.device, replica: Sequence[int] = (), title: str = "", formula: float = 0.0
    ) -> None:
        self.title = title
        self.formula = formula
        self.events: list[Event] = []
        """Events of all ranks of `replica`, once a step has been recorded."""
        self._replica = replica
        self._is_next = False
        self._rank = rank
        self._device = device
        self._is_recording = False
        self._zero: _Mark = 0.0
        self._spans: list[_Span] = []

    def start(self) -> None:
        """Forget earlier events and set the zero. Call it on all ranks, just after a barrier."""
        self._spans.clear()
        # The zero is a time of the stream: with work still queued there it would lie after the barrier.
        self._synchronize()
        self._zero = self._mark()
        self._is_recording = True

    def span(self, action: Action, *, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Record what runs inside as one event; an action that raises is none."""
        return self._measure(action, stage, microbatch) if self._is_recording else nullcontext()

    def stop(self) -> list[Event]:
        """Stop recording and give this rank's events, in the order in which they ended."""
        self._is_recording = False
        self._synchronize()
        return [
            Event(self._rank, stage, action, microbatch, self._seconds_at(start), self._seconds_at(stop))
            for stage, action, microbatch, start, stop in self._spans
        ]

    def ask(self) -> None:
        """Record the next step. Call on all ranks."""
        self._is_next = True

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Put around each step's schedule. A collective where the step is recorded."""
        if not self._is_next:
            yield
            return
        self._is_next = False
        dist.barrier()
        self.start()
        yield
        events_of_rank = gather_json(self.stop())
        self.events = [
            Event(pipeline_rank, stage, Action(action), *rest)
            for rank in self._replica
            for pipeline_rank, stage, action, *rest in events_of_rank[rank]
        ]

    @contextmanager
    def _measure(self, action: Action, stage: int, microbatch: int) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append(_Span(stage, action, microbatch, start, self._mark()))

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds_at(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            assert isinstance(self._zero, float)
            return mark - self._zero
        assert isinstance(self._zero, torch.cuda.Event)
        return float(self._zero.elapsed_time(mark)) / 1e3

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def write_chrome_trace(events: Sequence[Event], path: Path) -> Path:
    """Write events as a trace that chrome://tracing and Perfetto open: one thread for each rank, times in us."""
    lines: list[dict[str, object]] = [_metadata("process_name", 0, name="pipeline")]
    for rank in sorted({event.rank for event in events}):
        lines.append(_metadata("thread_name", rank, name=f"rank {rank}"))
        lines.append(_metadata("thread_sort_index", rank, sort_index=rank))
    for event in events:
        # Whole nanoseconds, for a viewer to which two actions, one right after the other, must not overlap.
        start, stop = round(event.start_seconds * 1e9), round(event.stop_seconds * 1e9)
        lines.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "name": f"{event.action} {event.microbatch}",
                "cat": event.action.name,
                "ts": start / 1e3,
                "dur": (stop - start) / 1e3,
                "args": {"stage": event.stage, "microbatch": event.microbatch},
            }
        )
    path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _metadata(kind: str, rank: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "pid": 0, "tid": rank, "name": kind, "args": args}
