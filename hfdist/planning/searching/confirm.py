"""Traces the first layouts that a search has found: memory and time by formulas are replaced by those of traces."""

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
    wanted: int,
) -> tuple[Candidate, ...]:
    """Trace the first layouts until so many of them fit.

    Of a pipeline the rank that holds most by formula is traced.

    Args:
        candidates: the layouts that a search has found, the fastest first.
        architecture: the model's config, with the vocabulary of the tokenizer.
        model: the model's constants, as `measure` gives them.
        machines: the machines on which the run is to be.
        wanted: how many layouts to find that fit; where fewer fit, all are traced.

    Returns:
        The layouts that fit, the fastest first, and after them those that were not looked at. A layout that does not
        fit is left out. One that cannot be traced counts as one that fits, and keeps its figures by formulas.
    """
    confirmed: list[Candidate] = []
    rest = list(candidates)
    while rest and len(confirmed) < wanted:
        with warnings.catch_warnings():
            # Libraries warn their developers here, not the users of hfdist.
            warnings.simplefilter("ignore")
            candidate = _confirm_one(rest.pop(0), architecture, model, machines)
        if candidate is not None:
            confirmed.append(candidate)
    confirmed.sort(key=lambda candidate: candidate.time.seconds)
    return (*confirmed, *rest)


def _confirm_one(
    candidate: Candidate, architecture: PreTrainedConfig, model: ModelConstants, machines: Machines
) -> Candidate | None:
    """Give a layout with the memory and time of its trace; None: it does not fit, or a run would refuse it."""
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
        # A model may ask for values that fake tensors lack, and then anything may be raised: the formulas' figures
        # stay. What a run would refuse is a ConfigError.
        logger.info("not traced: %s: %s", layout, error)
        return candidate
    memory = trace.peak.with_runtime(machines.runtime_bytes)
    if memory.use.total > machines.usable_bytes:
        return None
    time = evaluator.time(replace(trace.costs, traffic=candidate.traffic), strategy)
    return replace(candidate, memory=memory, time=time, mfu=evaluator.mfu(layout, time), is_traced=True)
