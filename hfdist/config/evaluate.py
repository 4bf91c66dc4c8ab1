"""`evaluate.*`: what is measured on held-out data, when a run stops early, and what becomes of the best model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hfdist.config.ranges import limited


class Chat(Enum):
    """Whether prompts go through the tokenizer's chat template, as what a user says.

    `auto`: where the tokenizer has one.
    """

    auto = "auto"
    always = "always"
    never = "never"


class Export(Enum):
    """Whose weights become `<run.dir>/model`."""

    last = "last"
    best = "best"


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluations are made every `train.eval_every` steps, and at the end."""

    at_start: bool = False
    """Evaluate before the first step, too."""
    prompts: list[str] = field(default_factory=list)
    """Texts that the model continues at each evaluation, greedily, into samples.jsonl."""
    chat: Chat = Chat.auto
    max_new_tokens: int = limited(64, at_least=1)
    """Of each continuation; an end-of-text token ends it sooner."""
    metrics: list[str] = field(default_factory=list)
    """Names of metrics that installed packages offer (entry points `hfdist.metrics`), or `exact_match`, `word_f1`: of
    continued held-out prompts, beside what stands there."""
    num_generations: int = limited(32, at_least=1)
    """Held-out examples that are continued for the metrics, at the most."""
    # A checkpoint holds the newest 1000.
    patience: int | None = limited(None, at_least=1, at_most=999)
    """Evaluations in a row without a lower held-out loss, after which the run stops; null: never."""
    min_delta: float = limited(0.0, at_least=0)
    """By how much the loss must at least be lower than the best to count."""
    export: Export = Export.last
    """`best`: of the checkpoint with the lowest held-out loss."""
    lm_eval: list[str] = field(default_factory=list)
    """Tasks of EleutherAI's evaluation harness, for the exported model; its package is lm-eval."""
    lm_eval_include: str | None = None
    """A folder with YAML files of tasks of your own."""
