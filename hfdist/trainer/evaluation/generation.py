"""Measures with greedy continuations: of fixed prompts, for people to read, and of held-out ones, for metrics."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

from hfdist.collectives import on_rank_zero
from hfdist.config.data import ChatConfig
from hfdist.config.run import Chat
from hfdist.data.documents.examples import Example
from hfdist.data.tokenization.chat_template import ChatTemplate, RefusedError
from hfdist.errors import ConfigError
from hfdist.kept_generators import keeping_generators
from hfdist.plugins import load_plugin
from hfdist.rewards.generation import Generation
from hfdist.strategies.engine import Forward
from hfdist.trainer.step.step_lines import StepLines

logger = logging.getLogger(__name__)

GROUP = "hfdist.metrics"
"""Group of the entry points of metrics, in a package's pyproject.toml: `[project.entry-points."hfdist.metrics"]`."""
_RESERVED = re.compile(r"(.*_)?loss|perplexity|tokens|runtime|.*_per_second|model_preparation_time")
"""Names of figures that each evaluation has, so no metric may have them."""

Generate = Callable[[Sequence[Sequence[int]], Forward], list[list[int]]]
"""A function of the prompts' tokens and of a forward in the layout: gives the new tokens of each prompt on all ranks.

All ranks call it.
"""


class PromptSamples(StepLines):
    """Lets the model continue fixed prompts at each evaluation, and writes the texts into samples.jsonl.

    Args:
        path: the file of samples.
        tokenizer: turns the new tokens into text.
        generate: continues prompts.
        prompts: text of each prompt.
        ids: tokens of each prompt, as `encode_prompts` gives them.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate,
        prompts: Sequence[str],
        ids: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(path)
        self._tokenizer, self._generate, self._prompts, self._ids = tokenizer, generate, prompts, ids
        self._state = TrainerState()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Open the file, and keep the state, which tells the step of an evaluation."""
        self._state = state
        super().on_train_begin(args, state, control)

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Continue the prompts, write and log the texts; give no figure."""
        step = self._state.global_step
        for prompt, ids in zip(self._prompts, self._generate(self._ids, forward), strict=True):
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            self.write({"step": step, "prompt": prompt, "text": text})
            logger.info("step %d continues %r: %r", step, prompt, text)
        return {}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], chat: Chat, rendering: ChatConfig
) -> list[list[int]]:
    """Give the token ids of each prompt: as a user's message with the beginning of an answer, or as plain text.

    Raises:
        ConfigError: the tokenizer has no chat template where one is asked for, or its template refuses a prompt.
    """
    if chat is Chat.always and not tokenizer.chat_template:
        hint = "evaluate.chat=auto, or a tokenizer with a chat template"
        raise ConfigError("the tokenizer has no chat template", where="evaluate.chat", found=chat.value, hint=hint)
    encoded = []
    if chat is Chat.never or not tokenizer.chat_template:
        for prompt in prompts:
            ids = list(tokenizer(prompt)["input_ids"])
            # Some tokenizers put an end-of-text token after each text: nothing would follow it.
            if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
                del ids[-1]
            encoded.append(ids)
        return encoded
    template = ChatTemplate(tokenizer, rendering)
    system = [] if rendering.system is None else [{"role": "system", "content": rendering.system}]
    for prompt in prompts:
        try:
            text = template.render([*system, {"role": "user", "content": prompt}], None, asks=True)
        except RefusedError as error:
            what = f"the chat template refuses a prompt: {error}"
            raise ConfigError(what, where="evaluate.prompts", found=prompt, hint="evaluate.chat=never") from error
        # The template has written the special tokens.
        encoded.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return encoded


Metric = Callable[[Sequence[Generation]], float | Mapping[str, float]]
"""A function that gives one figure of texts, reported as `eval_<name>`, or several by key: `eval_<name>_<key>`.

Rank 0 alone calls it.
"""


def exact_match(generations: Sequence[Generation]) -> float:
    """Give the share of texts that equal their references, without the space around both; from 0 to 1."""
    return sum(one.text.strip() == one.reference.strip() for one in generations) / len(generations)


def word_f1(generations: Sequence[Generation]) -> float:
    """Give the mean F1 of the texts' words against those of their references, in any order; from 0 to 1."""
    return sum(_f1(one.text.split(), one.reference.split()) for one in generations) / len(generations)


def _f1(words: list[str], wanted: list[str]) -> float:
    """Give the harmonic mean of precision and recall: 2 common / (all words + all wanted); two empty texts: 1."""
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


BUILT_IN: Mapping[str, Metric] = MappingProxyType({"exact_match": exact_match, "word_f1": word_f1})
"""hfdist's own metrics by name: no entry points, as a checkout that was installed earlier would not have new ones."""


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Find metrics by name, and import the packages that offer them; ConfigError: an unknown or reserved name."""
    for name in names:
        if _RESERVED.fullmatch(name):
            what = "a metric of this name would take the place of a figure that each evaluation has"
            raise ConfigError(what, where="evaluate.metrics", found=name, hint="another name for its entry point")
    return {name: BUILT_IN[name] if name in BUILT_IN else _load(name) for name in names}


def _load(name: str) -> Metric:
    expected = "a function of a list of hfdist.Generation that gives a number, or numbers by name"
    key, hint = "evaluate.metrics", "evaluate.metrics=[{}]"
    metric: Metric = load_plugin(GROUP, name, kind="metric", expected=expected, where=key, hint=hint, built_in=BUILT_IN)
    return metric


def compute(name: str, metric: Metric, generations: Sequence[Generation]) -> dict[str, float]:
    """Give a metric's figures by name, without touching the generators that training draws from.

    Raises:
        Exception: whatever the metric raises.
        TypeError, ValueError: the metric does not give numbers.
    """
    with keeping_generators():
        value = metric(generations)
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(figure) for key, figure in value.items()}
    return {name: float(value)}


class GenerationMetrics:
    """Lets the model continue held-out prompts at each evaluation, and gives the texts to metrics.

    A metric that fails is logged, and its figure left out: the training goes on, since no loss depends on it.

    Args:
        tokenizer: turns tokens into text.
        generate: continues prompts.
        examples: held-out prompts with their references.
        metrics: metrics by name.
        max_new_tokens: the most tokens of a continuation; references are cut to as many.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate,
        examples: Sequence[Example],
        metrics: Mapping[str, Metric],
        max_new_tokens: int,
    ) -> None:
        self._tokenizer, self._generate, self._examples, self._metrics = tokenizer, generate, examples, metrics
        self._max_new_tokens = max_new_tokens

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Give the figures as `eval_<metric>` on all ranks; rank 0 computes them. None: the metric has failed."""
        continued = self._generate([example.prompt for example in self._examples], forward)
        figures: dict[str, float | None] = on_rank_zero(lambda: self._compute(continued))
        return {f"{prefix}_{name}": value for name, value in figures.items()}

    def _compute(self, continued: list[list[int]]) -> dict[str, float | None]:
        def decode(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

        generations = [
            Generation(
                prompt=decode(example.prompt),
                text=decode(ids),
                reference=decode(example.reference[: self._max_new_tokens]),
                columns=example.columns,
            )
            for example, ids in zip(self._examples, continued, strict=True)
        ]
        figures: dict[str, float | None] = {}
        for name, metric in self._metrics.items():
            try:
                figures |= compute(name, metric, generations)
            except Exception as error:  # a metric is somebody else's code, and may raise anything
                logger.warning("the metric %s fails: %s: %s", name, type(error).__name__, error)
                figures[name] = None
        return figures
