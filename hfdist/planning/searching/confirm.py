"""The first of the layouts that a search has found, with the memory and time of their traces in place of formulas."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig

from hfdist.errors import ConfigError
from hfdist.planning.searching.constants import ModelConstants
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.tracing.memory import fullest_pipeline, trace_rank

logger = logging.getLogger(__name__)


def confirm(
    candidates: Sequence[Candidate],
    architecture: PreTrainedConfig,
    model: ModelConstants,
    machines: Machines,
    *,
    number: int,
) -> tuple[Candidate, ...]:
    """Trace the first layouts until so many fit, and give these, the fastest first, before those that were not traced.

    Of a pipeline the rank that holds most by formula is traced.

    Args:
        candidates: the layouts that a search has found, the fastest first.
        architecture: as `find_architecture` gives it, with the vocabulary of the tokenizer.
        model: as `measure` gives it.
        machines: where it is to run.
        number: how many to trace at the least; of those that do not fit more.
    """
    traced: list[Candidate] = []
    left = list(candidates)
    while left and len(traced) < number:
        with warnings.catch_warnings():
            # Libraries warn their developers here, not the users of hfdist.
            warnings.simplefilter("ignore")
            one = _trace(left.pop(0), architecture, model, machines)
        if one is not None:
            traced.append(one)
    return (*sorted(traced, key=lambda one: one.time.seconds), *left)


def _trace(
    candidate: Candidate, architecture: PreTrainedConfig, model: ModelConstants, machines: Machines
) -> Candidate | None:
    """Give it with the memory and time of its trace; None: it does not fit, or the model cannot be run so."""
    layout, evaluator = candidate.layout, Evaluator(candidate.config, model, machines)
    try:
        strategy = evaluator.strategy(layout, candidate.config)
        pipeline = fullest_pipeline(candidate.config, architecture, strategy)
        trace = trace_rank(
            candidate.config,
            architecture,
            world_size=layout.world_size,
            rank=pipeline[candidate.memory.rank // len(strategy.topology.pipelines)],
            device_type=machines.hardware.device_type,
        )
    except ConfigError:
        return None
    except Exception as error:
        # A model may ask for values that fake tensors lack; what a run would refuse is a ConfigError.
        logger.info("not traced: %s: %s", layout, error)
        return candidate
    memory = trace.peak.with_runtime(machines.runtime_bytes)
    if memory.use.total > machines.usable_bytes:
        return None
    time = evaluator.time(replace(trace.costs, traffic=candidate.traffic), strategy)
    return replace(candidate, memory=memory, time=time, mfu=evaluator.mfu(layout, time), is_traced=True)
