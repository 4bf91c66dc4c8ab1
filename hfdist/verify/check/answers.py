"""The answers of `hfdist check`: for each choice the checks of a run before its first step, and a small training.

    the config's checks -> the model's own checks -> its sizes -> two steps of a small model, in the layout and whole

The refusals are those of a run. All steps but the last use the architecture at its full size, without weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

import torch
from transformers import PreTrainedConfig

from hfdist.config.checks.preflight import plan_run
from hfdist.config.data import Packing
from hfdist.config.model import AdapterConfig, Attention
from hfdist.config.run import RunConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.task import TaskName
from hfdist.errors import ConfigError, HfdistError
from hfdist.models.build import make_without_values
from hfdist.models.peft_config import check_adapter
from hfdist.run.model import check_packing, find_model, why_documents_mix
from hfdist.strategies.model_fit import check_model_fits
from hfdist.strategies.select import device_type_here, select_strategy
from hfdist.tune.fit_model import check_fits
from hfdist.verify.check.questions import Question, ask_layouts, ask_others, ask_tasks
from hfdist.verify.check.small_run import MOST_TOKENS, Step, train_small
from hfdist.verify.small_model import small_architecture

BOUND = 1e-3
"""Largest relative difference from one process that rounding explains; a wrong layout differs by 1e-2 and more."""


class Verdict(Enum):
    """Whether the model goes with a choice; `untried`: no check refuses it, but no small model of the class trains."""

    yes = "yes"
    no = "no"
    untried = "untried"


_TAKEN = (Verdict.yes, Verdict.untried)
"""Verdicts of a task whose runs all other questions are about, the better verdict first."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question."""

    question: Question
    verdict: Verdict
    reason: HfdistError | None = None
    """Why the verdict is not `yes`."""
    remark: str | None = None
    """What else a user should know of a `yes`."""


class _Untried(Exception):
    """No small model of the class trains even on one process."""

    def __init__(self, reason: HfdistError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Checker:
    """Answers questions about one model, each by what a run of it would find. It trains on the CPU of this machine.

    Args:
        model: preset, folder, Hub id or GGUF file.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._trained: dict[str, list[Step] | HfdistError] = {}
        """Steps or the error of each small run, by its key: tasks with the same head have the same small run."""

    def answers(self) -> Iterator[Answer]:
        """Answer everything: tasks, then all others in runs of the first task that trains, or else that is untried.

        Raises:
            HfdistError: no task takes the model, or it cannot be found or read: the refusal of the first task.
        """
        answers = list(map(self.answer, ask_tasks()))
        taken = sorted((one for one in answers if one.verdict in _TAKEN), key=lambda one: _TAKEN.index(one.verdict))
        refusal = answers[0].reason
        if not taken and refusal is not None:
            # Without a task there is no run that the other questions could be about.
            raise refusal
        yield from answers
        command = taken[0].question.command
        yield from map(self.answer, chain(ask_layouts(command), ask_others(command)))

    def answer(self, question: Question) -> Answer:
        """Answer one question."""
        try:
            remark = self._try(question)
        except _Untried as error:
            return Answer(question=question, verdict=Verdict.untried, reason=error.reason)
        except HfdistError as error:
            return Answer(question=question, verdict=Verdict.no, reason=error)
        return Answer(question=question, verdict=Verdict.yes, remark=remark)

    def _try(self, question: Question) -> str | None:
        """Try a choice, and give a remark for the user or None; HfdistError: the model does not go with the choice."""
        config = question.config(self._model)
        processes = config.strategy.mesh.world_size
        topology, batch = plan_run(config, world_size=processes)
        strategy = select_strategy(
            config.strategy, config.train, topology=topology, batch=batch, device_type=device_type_here()
        )
        check_adapter(config.adapter, config.model, strategy)
        found = find_model(config)
        check_model_fits(found.config, processes)
        head = config.task.name.traits.head
        with torch.device("meta"):
            model = make_without_values(found.config.model, found.architecture, head=head)
        check_packing(model, config.data.packing, strategy, head)
        if config.task.name is not TaskName.causal_lm:
            check_fits(model, head)
        if question.about != "packing":
            self._compare(found.config, found.architecture, processes)
            return None
        return None if config.data.packing is Packing.none else why_documents_mix(model)

    def _compare(self, config: RunConfig, architecture: PreTrainedConfig, processes: int) -> None:
        """Compare a small model that trains as asked with one process and the attention that transformers chooses.

        Raises:
            _Untried: it does not train on one process.
            HfdistError: it does not train as asked, or not as on one process.
        """
        try:
            small = small_architecture(architecture, config.strategy, vocab_size=MOST_TOKENS)
            plain = copy.deepcopy(small)
            plain._attn_implementation = None
            model, strategy = replace(config.model, attention=Attention.auto), StrategyConfig(data=1)
            alone = replace(config, strategy=strategy, model=model, adapter=AdapterConfig())
            whole = self._steps(alone, plain, 1)
        except HfdistError as error:
            raise _Untried(error) from error
        found = self._steps(config, small, processes)
        if config.adapter.is_used:
            # An adapter trains other weights than the run on one process, so that there is nothing to compare.
            return
        worst = largest_difference(found, whole)
        if worst > BOUND:
            what = "a small model of the class does not train as on one process"
            raise ConfigError(what, where="two steps", found=f"losses or norms of gradients differ by {worst:.0e}")

    def _steps(self, config: RunConfig, small: PreTrainedConfig, processes: int) -> list[Step]:
        """Give the steps of a small run, which is trained once; HfdistError: why it does not train."""
        head, attention = config.task.name.traits.head, small._attn_implementation
        key = repr((config.strategy, config.adapter, head, attention, small.to_json_string()))
        if key not in self._trained:
            try:
                self._trained[key] = train_small(config, small, processes)
            except HfdistError as error:
                self._trained[key] = error
        found = self._trained[key]
        if isinstance(found, HfdistError):
            raise found
        return found


def largest_difference(found: list[Step], whole: list[Step]) -> float:
    """Give the largest relative difference of losses and norms; infinite where one is not a number."""
    pairs = zip(chain(*found), chain(*whole), strict=True)
    return max((_relative_difference(ours, reference) for ours, reference in pairs), default=0.0)


def _relative_difference(ours: float, reference: float) -> float:
    if ours == reference and math.isfinite(ours):
        # Both are 0 where the outputs of a model do not depend on its weights: norms of gradients.
        return 0.0
    if reference == 0:
        return math.inf
    difference = abs(ours - reference) / abs(reference)
    return math.inf if math.isnan(difference) else difference
