"""The measured schedule of one step, gathered from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hfdist.collectives import gather_json
from hfdist.pipeline.timeline import Event, Recorder, from_json, to_json
from hfdist.topology import Topology


class ScheduleTrace:
    """Records the step that is asked for, and nothing else.

    Args:
        topology: the place of this rank.
        device: of this rank.
        title: what runs, for people.
        formula: the idle share that the schedule would have with equal stages, from 0 to 1.
    """

    def __init__(self, topology: Topology, device: torch.device, *, title: str, formula: float) -> None:
        self.title = title
        self.formula = formula
        self.recorder = Recorder(rank=topology.pipeline_rank, device=device)
        self.events: list[Event] = []
        """Of all ranks of the first replica, once a step has been recorded."""
        self._topology = topology
        self._is_next = False

    def ask(self) -> None:
        """Record the next step. Call on all ranks."""
        self._is_next = True

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Put around each step's schedule."""
        if not self._is_next:
            yield
            return
        self._is_next = False
        dist.barrier()
        self.recorder.start()
        yield
        every = gather_json(to_json(self.recorder.events()))
        self.events = [event for rank in self._topology.replica(0) for event in from_json(every[rank])]
