"""What comes with the evaluations of a run, and with the objective of its task."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import TrainerCallback

from hfdist.config.run import RunConfig
from hfdist.environments.registry import check_environment
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState
from hfdist.topology import Topology
from hfdist.trainer.evaluation.evaluators import check_named, make_evaluators
from hfdist.tune.choose import check_rewards
from hfdist.tune.generators.servers.choose import ask_servers


class EvaluatorsPart(Part):
    """Measures, samples and stops as `evaluate.*` says."""

    joins = Joins.constructor

    def check(self, config: RunConfig, topology: Topology) -> None:
        """Check the names of metrics and tasks."""
        check_named(config, topology)

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Set what evaluations measure, too."""
        run.measures, callbacks = make_evaluators(
            run.config,
            run.data.held_out,
            model=run.model,
            tokenizer=run.data.tokenizer,
            arguments=run.arguments,
            topology=run.topology,
        )
        return callbacks


class ObjectivePart(Part):
    """Writes the files of the task's objective, and ends its processes."""

    joins = Joins.constructor

    def check(self, config: RunConfig, topology: Topology) -> None:
        """Check the names of rewards, the environment, and the servers that answer."""
        check_rewards(config.task.rewards)
        if config.task.environment is not None:
            check_environment(config.task)
        ask_servers(config)

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Give those of the objective."""
        return [] if run.objective is None else run.objective.callbacks()
