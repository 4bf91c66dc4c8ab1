"""The callback that counts what each rank sends in a step, by axis of the mesh: in one step, as all send the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from transformers import TrainerControl, TrainerState

from hfdist.collectives import gather_json, world_size
from hfdist.control_group import control_group
from hfdist.records import RunRecorder
from hfdist.sent_bytes import SentBytes, axis_of
from hfdist.topology import Topology
from hfdist.trainer.step.objective import ObjectiveCallback

_COUNTED_STEP = 4
"""Number of the counted step: the first two settle buckets and prefetches, and the third records the schedule."""


class Traffic(ObjectiveCallback):
    """Counts the fourth step of a start, or the last one if there are fewer; rank 0 writes it into run.json.

    Args:
        topology: the place of this rank in the layout.
        recorder: writes the run's record, on rank 0; None on the others.
        wait: waits until no other thread sends, as a save does.
        warm_up_steps: first steps of each start, which send more than the others; the fourth after them is counted.
        reads_twice: whether the objective reads each micro batch before the step. What it sends then counts, too; what
            an objective sends to answer prompts does not.
    """

    def __init__(
        self,
        topology: Topology,
        recorder: RunRecorder | None,
        *,
        wait: Callable[[], None],
        warm_up_steps: int = 0,
        reads_twice: bool = False,
    ) -> None:
        self._wait, self._reads_twice = wait, reads_twice
        self._counted_step = _COUNTED_STEP + warm_up_steps
        self._topology, self._recorder = topology, recorder
        self._step: int | None = None
        """Number of steps before the counted one; None: nothing is to be counted."""
        self._counting: SentBytes | None = None
        """Counts what this rank sends; None: nothing is being counted."""
        self._has_begun = False
        """Whether the step has begun with its objective."""

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Choose the step. A collective where there are other ranks."""
        self._step = None
        if world_size() > 1:
            self._step = min(state.global_step + self._counted_step, state.max_steps) - 1
        # All ranks make the group here, so that it is not made in the counted step.
        control_group()

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Begin to count, if this is the step to count and its objective has not begun it already."""
        if not self._has_begun:
            self._begin(state)
        self._has_begun = False

    def on_objective(self, state: TrainerState) -> None:
        """Begin to count before an objective that reads twice sends something, such as all embeddings of a step."""
        if self._reads_twice:
            self._begin(state)
            self._has_begun = True

    def _begin(self, state: TrainerState) -> None:
        """Count from now on, if this is the step to count; a save that goes on ends first, as it sends, too."""
        self._stop()
        if state.global_step == self._step:
            self._wait()
            # Not by `with`: another event ends it.
            self._counting = SentBytes().__enter__()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Gather what all ranks have counted. A collective after the counted step."""
        counted = self._stop()
        if counted is None:
            return
        self._step = None
        found = summarize(gather_json(by_axis(counted, self._topology), control_group()))
        if self._recorder is not None:
            self._recorder.record.traffic = {"step": state.global_step, "axes": found}
            self._recorder.write()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """End the counting: the training may have ended within the step."""
        self._stop()

    def _stop(self) -> SentBytes | None:
        """End the counting, and give what was counted; None: nothing was."""
        counted, self._counting = self._counting, None
        if counted is not None:
            counted.__exit__()
        return counted


class _Sent(TypedDict):
    """What one rank has sent along an axis."""

    calls: int
    """Number of collectives and messages."""
    kinds: dict[str, int]
    """Bytes by kind of collective."""


class _SentOfAll(_Sent):
    """What the rank that sends most has sent along an axis, and the mean of all ranks."""

    sent_bytes: int
    mean_bytes: int


def by_axis(counted: SentBytes, topology: Topology) -> dict[str, _Sent]:
    """Give what this rank has sent along each axis: bytes by kind of collective, and the calls."""
    found: dict[str, _Sent] = {}
    for channel, num_bytes in counted.num_bytes.items():
        of_axis = found.setdefault(axis_of(channel, topology), {"calls": 0, "kinds": {}})
        of_axis["calls"] += counted.calls[channel]
        of_axis["kinds"][channel.kind] = of_axis["kinds"].get(channel.kind, 0) + num_bytes
    return found


def summarize(ranks: list[dict[str, _Sent]]) -> dict[str, _SentOfAll]:
    """Give for each axis what the rank that sends most along it sends, and the mean of all ranks."""
    found: dict[str, _SentOfAll] = {}
    for axis in sorted({axis for rank in ranks for axis in rank}):
        senders = [rank[axis] for rank in ranks if axis in rank]
        num_bytes = [sum(sender["kinds"].values()) for sender in senders]
        most = max(num_bytes)
        mean = round(sum(num_bytes) / len(ranks))
        found[axis] = {"sent_bytes": most, "mean_bytes": mean, **senders[num_bytes.index(most)]}
    return dict(sorted(found.items(), key=lambda item: -item[1]["sent_bytes"]))
