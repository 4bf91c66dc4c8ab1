"""What is generated at evaluations: continuations of fixed prompts, for people, and of held-out ones, for metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfdist.collectives import on_rank_zero
from hfdist.config.data import ChatConfig
from hfdist.config.run import Chat, EvaluateConfig
from hfdist.data.documents.prompts import Example
from hfdist.data.tokenization.chat_template import ChatTemplate, Message, RefusedError
from hfdist.errors import ConfigError
from hfdist.strategies.base import Forward
from hfdist.trainer.evaluation.generation import Limits, continue_prompts
from hfdist.trainer.evaluation.metrics import Generation, Metric, compute
from hfdist.trainer.reporting.jsonl import StepLines

# A trainer is Any here: transformers declares all its parts as optional, and they exist by the time of an evaluation.

logger = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"


class PromptGenerator:
    """Continues prompts with the model of a Trainer, in its layout.

    Args:
        trainer: with a strategy and a tokenizer.
        max_new_tokens: of each continuation.

    Raises:
        ConfigError: so many leave the model no room for a prompt.
    """

    def __init__(self, trainer: Any, max_new_tokens: int) -> None:
        self._trainer = trainer
        self._limits = Limits(
            max_new_tokens=max_new_tokens, end_ids=_end_ids(trainer), most_tokens=_num_positions(trainer)
        )
        self._limits.room()

    def __call__(self, prompts: Sequence[Sequence[int]], forward: Forward) -> list[list[int]]:
        """Give the continuations as token ids, on all ranks. Call it on all ranks."""
        args = self._trainer.args
        return continue_prompts(
            prompts,
            forward,
            self._limits,
            topology=self._trainer.strategy.topology,
            rows_at_once=args.per_device_eval_batch_size,
            device=args.device,
        )


def _end_ids(trainer: Any) -> frozenset[int]:
    """Chat models may end an answer with another token than a document."""
    ends = {trainer.processing_class.eos_token_id}
    config = getattr(trainer.model, "generation_config", None)
    named = None if config is None else config.eos_token_id
    ends |= set(named) if isinstance(named, list) else {named}
    return frozenset(ends - {None})


def _num_positions(trainer: Any) -> int | None:
    number = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    return number if isinstance(number, int) and number > 0 else None


class PromptSamples(TrainerCallback):
    """Lets the model continue fixed prompts at each evaluation, and writes what comes into samples.jsonl.

    Args:
        run_dir: of the run.
        trainer: with a strategy and a tokenizer.
        config: `evaluate.*`.
        chat: `data.chat`, by which the training's conversations are rendered.

    Raises:
        ConfigError: the tokenizer's chat template is missing, or refuses a prompt.
    """

    def __init__(self, run_dir: Path, trainer: Any, config: EvaluateConfig, chat: ChatConfig) -> None:
        self._trainer, self._prompts = trainer, config.prompts
        self._lines = StepLines(run_dir / SAMPLES)
        self._ids = encode_prompts(trainer.processing_class, config.prompts, config.chat, chat)
        self._continue = PromptGenerator(trainer, config.max_new_tokens)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Open the file; samples of steps that will be done are set aside."""
        if state.is_world_process_zero:
            self._lines.open(state.global_step)

    def on_go_back(self, state: TrainerState) -> None:
        """Set the samples aside of steps that will be done again."""
        if state.is_world_process_zero:
            self._lines.open(state.global_step)

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Continue, write and tell; gives no figure."""
        step = self._trainer.state.global_step
        for prompt, ids in zip(self._prompts, self._continue(self._ids, forward), strict=True):
            text = self._trainer.processing_class.decode(ids, skip_special_tokens=True)
            self._lines.write({"step": step, "prompt": prompt, "text": text})
            logger.info("step %d continues %r: %r", step, prompt, text)
        return {}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], chat: Chat, rendering: ChatConfig
) -> list[list[int]]:
    """Give the token ids of each prompt: as a user's message with the beginning of an answer, or as plain text.

    Raises:
        ConfigError: `chat` asks for a template that the tokenizer does not have, or the template refuses a prompt.
    """
    if chat is Chat.always and not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            where="evaluate.chat",
            found=chat.value,
            hint="evaluate.chat=auto, or a tokenizer with a chat template",
        )
    if chat is Chat.never or not tokenizer.chat_template:
        return [_without_end(tokenizer, list(tokenizer(prompt)["input_ids"])) for prompt in prompts]
    template = ChatTemplate(tokenizer, rendering)
    system = [] if rendering.system is None else [{"role": "system", "content": rendering.system}]
    return [_encode_message(tokenizer, template, system, prompt) for prompt in prompts]


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Some tokenizers put an end-of-text token behind each text."""
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def _encode_message(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, system: list[Message], prompt: str
) -> list[int]:
    try:
        text = template.render([*system, {"role": "user", "content": prompt}], None, asks=True)
    except RefusedError as error:
        raise ConfigError(
            f"the chat template refuses a prompt: {error}",
            where="evaluate.prompts",
            found=prompt,
            hint="evaluate.chat=never",
        ) from error
    # The template has written the special tokens.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class GenerationMetrics:
    """Lets the model continue held-out prompts at each evaluation, and hands what comes to metrics.

    A metric that fails is told about, and its figure left out: the training goes on, since no loss depends on it.

    Args:
        trainer: with a strategy and a tokenizer.
        examples: held-out prompts and references.
        metrics: by name.
        max_new_tokens: of each continuation, and of each reference.
    """

    def __init__(
        self, trainer: Any, examples: Sequence[Example], metrics: Mapping[str, Metric], max_new_tokens: int
    ) -> None:
        self._tokenizer, self._examples, self._metrics = trainer.processing_class, examples, metrics
        self._max_new_tokens = max_new_tokens
        self._continue = PromptGenerator(trainer, max_new_tokens)

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Give `eval_<metric>`, computed on rank 0, on all ranks."""
        continued = self._continue([example.prompt for example in self._examples], forward)
        figures: dict[str, float | None] = on_rank_zero(lambda: self._compute(continued))
        return {f"{prefix}_{name}": value for name, value in figures.items()}

    def _compute(self, continued: list[list[int]]) -> dict[str, float | None]:
        generations = [
            Generation(
                prompt=self._text(example.prompt),
                text=self._text(ids),
                reference=self._text(example.reference[: self._max_new_tokens]),
            )
            for example, ids in zip(self._examples, continued, strict=True)
        ]
        figures: dict[str, float | None] = {}
        for name, metric in self._metrics.items():
            try:
                figures |= compute(name, metric, generations)
            except Exception as error:  # whatever a metric raises
                logger.warning("the metric %s fails: %s: %s", name, type(error).__name__, error)
                figures[name] = None
        return figures

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
