"""Finds the fewest processes on which a run fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, ResourceError
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.searching.confirm import confirm
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import divisors
from hfdist.planning.searching.search import measure, search_layouts

_MOST_PROCESSES = 2**17
"""The most processes that are tried."""


def fewest_processes(
    config: RunConfig, architecture: PreTrainedConfig, machines: Machines, *, searches: bool
) -> Candidate:
    """Give a layout of the fewest processes that fit: shares of one machine, or whole machines.

    Args:
        config: the run's config.
        architecture: the model's config, with the vocabulary of the tokenizer.
        machines: the machines on which the run is to be.
        searches: whether any layout will do, and the fastest is given; else that of `config`, with more data ranks.

    Raises:
        ConfigError: as the run itself would on one process, or in the layout of `config`.
        ResourceError: it fits on no number of processes.
    """
    model = measure(config, architecture, machines, as_asked=not searches)
    evaluator = Evaluator(config, model, machines)
    for processes in _numbers_of_processes(machines.per_machine):
        if searches:
            found = search_layouts(config, model, machines, processes=processes, best=3).candidates
        else:
            as_asked = _as_asked(evaluator, processes)
            found = () if as_asked is None else (as_asked,)
        confirmed = confirm(found, architecture, model, machines, wanted=1)
        if confirmed:
            return confirmed[0]
    hint = "train.micro_batch_size=1 train.gradient_checkpointing=true"
    if not searches:
        hint += ", or plan.search=true, which looks at all layouts"
    raise ResourceError(
        f"the {'run' if searches else 'layout'} fits on no number of processes",
        where="plan.find",
        found=f"up to {_MOST_PROCESSES} of {machines.usable_bytes / 2**30:.3g} GiB",
        hint=hint,
    )


def _numbers_of_processes(per_machine: int) -> Iterator[int]:
    """Give numbers of processes to try: shares of a machine, then whole machines by ones, later by larger steps."""
    yield from divisors(per_machine)
    machines = 2
    while machines * per_machine <= _MOST_PROCESSES:
        yield machines * per_machine
        # Steps of a quarter at the most: 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
        machines += max(1, 2 ** (machines.bit_length() - 3))


def _as_asked(evaluator: Evaluator, processes: int) -> Candidate | None:
    """Evaluate the layout of the run's own config on so many processes; None: it is refused, or does not fit."""
    strategy = evaluator.config.strategy
    # The number of data ranks follows from the number of processes.
    any_data = replace(evaluator.config, strategy=replace(strategy, data=None))
    try:
        layout = Layout.of(any_data, processes, stages_per_rank(strategy.schedule, strategy.stages_per_rank))
        plan_run(layout.apply(evaluator.config), world_size=processes)
    except ConfigError:
        return None
    return evaluator.evaluate(layout)
