"""The outcome of a run: all that the screen at its end says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hfdist.config.run import RunConfig
from hfdist.data import PoolReport
from hfdist.records import RunRecord


class PlannedAndMeasured(NamedTuple):
    """A figure as it was planned, and as it was measured."""

    planned: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The outcome of a run, for the screen at its end; None: not known, or not measured."""

    config: RunConfig
    record: RunRecord
    layout: str
    """The processes and the axes of the mesh."""
    model_type: str
    num_parameters: int
    num_trained: int
    folder: Path
    """The folder that a user opens: the model, or the adapter alone."""
    adapter_folder: Path | None = None
    step: int
    """Step of the weights in the folder."""
    stopped_by: str | None = None
    """The budget that has stopped the run before its end."""
    loss: float | None = None
    """Loss on held-out data of the weights in the folder."""
    loss_before: float | None = None
    """Loss on held-out data before the first step."""
    without_context: float | None = None
    """Loss of a unigram model on the same data, where it means something."""
    recall: float | None = None
    """Share of held-out queries that find their text first among all held-out ones."""
    reciprocal_rank: float | None = None
    """Mean of 1 / place of the right text among all held-out ones, for each held-out query."""
    accuracy: float | None = None
    """Share of the held-out pairs whose chosen answer is preferred."""
    margin: float | None = None
    """Mean difference of the rewards of chosen and rejected answers."""
    num_held_out: int | None = None
    """Number of held-out pairs."""
    rewards: tuple[float, float] | None = None
    """Mean reward of the first and of the last logged step."""
    each_reward: Mapping[str, float] = field(default_factory=dict)
    """Mean of each reward in the last logged step, where there are several."""
    learns_nothing: bool = False
    """Whether answers to one prompt have always had the same reward."""
    cut_off: float | None = None
    """Share of the last answers that were cut at `task.max_new_tokens`."""
    failed_episodes: float | None = None
    """Share of the last episodes whose environment has failed."""
    pools: Sequence[PoolReport] = ()
    num_documents: int | None = None
    """Number of documents that were trained on."""
    left_out: str | None = None
    """How many documents were cut or left out, in words."""
    peak_bytes: Sequence[Mapping[str, float]] = ()
    """The most memory that each rank has used, by kind."""
    graded: Mapping[str, PlannedAndMeasured] = field(default_factory=dict)
    """Figures of the plan, by the names of `planning.grade`."""
    is_chat: bool = False
    """Whether the model has learned turns of a chat, so that a user asks it in its chat template."""
    sample_prompt: str | None = None
    """A prompt of the held-out examples."""
