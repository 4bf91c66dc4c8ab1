"""`task.*`: what is trained: the next token, preferences, a reward, or a policy by its rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hfdist.config.data import RowFormat
from hfdist.config.ranges import limited


class TaskName(Enum):
    """What a run trains.

    `causal_lm`: the next token; `dpo`: pairs of answers, directly; `kto`: answers that were liked or not; `reward`: a
    model that scores answers, from pairs; `grpo`, `rloo`: its own answers to prompts, by their rewards.
    """

    causal_lm = "causal_lm"
    dpo = "dpo"
    kto = "kto"
    reward = "reward"
    grpo = "grpo"
    rloo = "rloo"

    @property
    def row_format(self) -> RowFormat | None:
        """The format that rows must have; None: any of the others."""
        return _ROWS.get(self)

    @property
    def has_reference(self) -> bool:
        """Whether its rows are compared with the model that it begins with."""
        return self in (TaskName.dpo, TaskName.kto)

    @property
    def is_planned(self) -> bool:
        """Whether a plan tells all of a run's memory and time: it knows no rollouts, and models of next tokens only."""
        return self in (TaskName.causal_lm, TaskName.dpo, TaskName.kto)

    @property
    def is_reinforcement(self) -> bool:
        """Whether the model answers prompts, and learns from the rewards."""
        return self in (TaskName.grpo, TaskName.rloo)

    @property
    def unit(self) -> str:
        """What a row of its data is called."""
        return _UNITS.get(self, "document")

    @property
    def loss_unit(self) -> str:
        """What the training loss is the mean of, in words for an axis."""
        return _LOSS_UNITS[self]


_ROWS = {
    TaskName.dpo: RowFormat.preference,
    TaskName.reward: RowFormat.preference,
    TaskName.kto: RowFormat.unpaired_preference,
}

_UNITS = {
    TaskName.dpo: "pair",
    TaskName.reward: "pair",
    TaskName.kto: "answer",
    TaskName.grpo: "prompt",
    TaskName.rloo: "prompt",
}

_LOSS_UNITS = {
    TaskName.causal_lm: "nats a token",
    TaskName.dpo: "mean of pairs",
    TaskName.kto: "mean of answers",
    TaskName.reward: "mean of pairs",
    TaskName.grpo: "mean of tokens",
    TaskName.rloo: "mean of answers",
}


class PreferenceLoss(Enum):
    """How preferences become a loss.

    Of `dpo`: `sigmoid`, `robust`, `hinge`, `ipo`, `apo_zero`, `apo_down`; of `kto`: `kto`, `apo_zero_unpaired`; of
    `reward`: `sigmoid`.
    """

    sigmoid = "sigmoid"
    robust = "robust"
    hinge = "hinge"
    ipo = "ipo"
    apo_zero = "apo_zero"
    apo_down = "apo_down"
    kto = "kto"
    apo_zero_unpaired = "apo_zero_unpaired"


LOSSES = {
    TaskName.dpo: (
        PreferenceLoss.sigmoid,
        PreferenceLoss.robust,
        PreferenceLoss.hinge,
        PreferenceLoss.ipo,
        PreferenceLoss.apo_zero,
        PreferenceLoss.apo_down,
    ),
    TaskName.kto: (PreferenceLoss.kto, PreferenceLoss.apo_zero_unpaired),
    TaskName.reward: (PreferenceLoss.sigmoid,),
}
"""Those of each task."""


SCORE = "score"
"""The layer of a model for sequence classification, as transformers calls it."""

REWARD_MODEL = "reward_model"
"""The name among rewards of a model's score."""


@dataclass(kw_only=True)
class TaskConfig:
    """What is trained, and how strictly."""

    name: TaskName = TaskName.causal_lm
    """What is learned: causal_lm | dpo | kto | reward | grpo | rloo."""
    loss: PreferenceLoss = PreferenceLoss.sigmoid
    """dpo: sigmoid | robust | hinge | ipo | apo_zero | apo_down; kto: kto | apo_zero_unpaired."""
    beta: float = limited(0.1, at_least=0)
    """How strictly the model stays with the one that it begins with; grpo, rloo: 0: not at all."""
    label_smoothing: float = limited(0.0, at_least=0, at_most=0.49)
    """robust: the share of pairs that may be the wrong way round."""
    desirable_weight: float = limited(1.0, at_least=0)
    """kto: weight of answers that were liked."""
    undesirable_weight: float = limited(1.0, at_least=0)
    """kto: weight of answers that were not liked."""
    num_generations: int = limited(8, at_least=2)
    """grpo, rloo: answers to each prompt; a sequence of train.*_batch_size is a prompt.

    A forward has so many rows for each.
    """
    max_new_tokens: int = limited(256, at_least=1)
    """Most tokens of an answer."""
    temperature: float = limited(1.0, above=0)
    """Temperature of the distribution that answers are drawn from."""
    top_k: int | None = limited(None, at_least=1)
    """Number of the likeliest tokens that an answer is drawn from; null: all."""
    top_p: float = limited(1.0, above=0, at_most=1)
    """Probability that the likeliest tokens, from which an answer is drawn, reach together."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards with their weights: {arithmetic: 1.0}; arithmetic, code, reward_model, or of installed packages.

    Packages offer them by entry points `hfdist.rewards`.
    """
    reward_model: str | None = None
    """grpo, rloo: folder of the model that the reward `reward_model` is the score of."""
    scale_rewards: bool = True
    """grpo: whether advantages are divided by the standard deviation of a prompt's rewards."""
    clip: float = limited(0.2, above=0)
    """How far the ratio of new to old probabilities may move a loss."""
    generators: int = limited(0, at_least=0)
    """grpo, rloo: processes beside the ranks that answer prompts; 0: the ranks, within the step."""
    max_staleness: int = limited(1, at_least=0)
    """generators: steps by which the policy that gave an answer may be older than the one that it trains."""
    sync_every: int = limited(1, at_least=1)
    """generators: steps between the policies that they get; <= max_staleness + 1."""
    answer_seconds: float = limited(600.0, above=0)
    """generators: time after which a prompt goes to another one, too."""
