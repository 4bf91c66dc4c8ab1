"""The measured schedule of one optimizer step: recorded on each rank, and written as a Chrome trace.

    recorder = Recorder(rank=rank, device=device)
    dist.barrier()
    recorder.start()
    with recorder.span(Action.forward, stage=0, microbatch=3):
        ...
    write_chrome_trace(events_of_all_ranks, path)

The clocks of two machines differ, so each rank counts from a zero of its own: a barrier at the start of the step. Rows
of the picture line up as well as ranks leave that barrier together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import fmean
from typing import Any

import torch


class Action(Enum):
    """What a rank does at a time. The values are the words of the picture's legend and of the trace."""

    forward = "forward"
    backward = "full backward"
    backward_input = "input gradient"
    backward_weight = "weight gradient"
    send = "send"
    wait = "wait to receive"
    optimizer = "optimizer"


COMPUTE = frozenset({Action.forward, Action.backward, Action.backward_input, Action.backward_weight})


@dataclass(frozen=True, kw_only=True)
class Event:
    """One action of one rank, in seconds since the barrier at the start of the step."""

    rank: int
    stage: int
    action: Action
    microbatch: int | None
    start_seconds: float
    stop_seconds: float


class Recorder:
    """One rank's events of one step. It records between `start()` and `events()`, and costs next to nothing otherwise.

    On a GPU, where a call returns before its work is done, times are taken on the current stream by CUDA events.
    """

    def __init__(self, *, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._recording = False
        self._zero: Any = None
        self._spans: list[tuple[Action, int, int | None, Any, Any]] = []

    def start(self) -> None:
        """Forget earlier events and set the zero. Call it on all ranks, just after a barrier."""
        self._spans.clear()
        # The zero is a time of the stream: with work still queued there it would lie behind the barrier.
        self._synchronize()
        self._zero = self._mark()
        self._recording = True

    def span(self, action: Action, *, stage: int, microbatch: int | None = None) -> AbstractContextManager[None]:
        """Record what runs inside as one event; an action that raises is none."""
        return self._measure(action, stage, microbatch) if self._recording else nullcontext()

    def events(self) -> list[Event]:
        """Stop recording and give this rank's events, in the order in which they ended."""
        self._recording = False
        self._synchronize()
        return [
            Event(
                rank=self._rank,
                stage=stage,
                action=action,
                microbatch=microbatch,
                start_seconds=_seconds_between(self._zero, start),
                stop_seconds=_seconds_between(self._zero, stop),
            )
            for action, stage, microbatch, start, stop in self._spans
        ]

    @contextmanager
    def _measure(self, action: Action, stage: int, microbatch: int | None) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append((action, stage, microbatch, start, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _seconds_between(start: Any, stop: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        return start.elapsed_time(stop) / 1e3
    return stop - start


def to_json(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Give events as plain values, so that ranks can send them to each other."""
    return [asdict(event) | {"action": event.action.name} for event in events]


def from_json(values: Iterable[dict[str, Any]]) -> list[Event]:
    """Undo `to_json`."""
    return [Event(**value | {"action": Action[value["action"]]}) for value in values]


def bubble_fraction(events: Iterable[Event]) -> float:
    """Give the share of the schedule in which ranks do not compute, from 0 to 1.

    Forwards and backwards are computing; sending and waiting are not. The schedule lasts from the first start to the
    last stop of any rank. The optimizer is no part of it, as in the formulas for schedules. There must be an event.
    """
    return 1 - fmean(busy_by_rank(list(events)).values())


def busy_by_rank(events: list[Event]) -> dict[int, float]:
    """Give the share of the schedule in which each rank computes."""
    schedule = [event for event in events if event.action is not Action.optimizer]
    first = min(event.start_seconds for event in schedule)
    last = max(event.stop_seconds for event in schedule)
    busy_seconds = dict.fromkeys(sorted({event.rank for event in events}), 0.0)
    reached = dict.fromkeys(busy_seconds, first)
    for event in sorted(schedule, key=lambda event: event.start_seconds):
        if event.action in COMPUTE:
            # Where two actions of a rank overlap, the time that they share counts once.
            busy_seconds[event.rank] += max(event.stop_seconds - max(event.start_seconds, reached[event.rank]), 0.0)
            reached[event.rank] = max(event.stop_seconds, reached[event.rank])
    return {rank: seconds / (last - first) for rank, seconds in busy_seconds.items()}


def write_chrome_trace(events: Iterable[Event], path: Path) -> Path:
    """Write events as a trace that chrome://tracing and Perfetto open: one thread for each rank, times in us."""
    events = list(events)
    lines: list[dict[str, Any]] = [_metadata("process_name", 0, name="pipeline")]
    for rank in sorted({event.rank for event in events}):
        lines += [
            _metadata("thread_name", rank, name=f"rank {rank}"),
            _metadata("thread_sort_index", rank, sort_index=rank),
        ]
    for event in events:
        # Whole nanoseconds, for a viewer to which two actions, one right after the other, must not overlap.
        start, stop = round(event.start_seconds * 1e9), round(event.stop_seconds * 1e9)
        lines.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": event.rank,
                "name": event.action.value if event.microbatch is None else f"{event.action.value} {event.microbatch}",
                "cat": event.action.name,
                "ts": start / 1e3,
                "dur": (stop - start) / 1e3,
                "args": {"stage": event.stage, "microbatch": event.microbatch},
            }
        )
    path.write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}), encoding="utf-8")
    return path


def _metadata(kind: str, rank: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": rank, "name": kind, "args": args}
