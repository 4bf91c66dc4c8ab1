"""Greedy continuations in the layout that trains: of fixed prompts, for people; of held-out ones, with their metrics.

Where a rank has all blocks, transformers' own `generate` continues its rows, with a cache of keys and values. Pipeline
and context ranks are only there for forwards as in training, so they compute all tokens again for each new one.
"""

from __future__ import annotations

import inspect
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerControl, TrainerState

from hfdist.collectives import on_rank_zero
from hfdist.config.data import ChatConfig
from hfdist.config.run import Chat, EvaluateConfig
from hfdist.data.documents.held_out import Example
from hfdist.data.tokenization.chat_template import ChatTemplate, RefusedError
from hfdist.errors import ConfigError
from hfdist.plugins import load_plugin
from hfdist.rewards.generation import Generation
from hfdist.strategies.base import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.reporting.callbacks import StepLines

logger = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"
GROUP = "hfdist.metrics"
"""Of entry points, in a package's pyproject.toml: `[project.entry-points."hfdist.metrics"]`."""
_RESERVED = re.compile(r"(.*_)?loss|perplexity|tokens|runtime|.*_per_second|model_preparation_time")

_LENGTH_STEP_TOKENS = 64
"""Sequences are padded to a multiple of it, so that few shapes occur."""

Generate = Callable[[Sequence[Sequence[int]], Forward], list[list[int]]]
"""(prompts, forward) -> their continuations, on all ranks. All ranks call it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a continuation ends."""

    max_new_tokens: int
    end_ids: frozenset[int]
    """Tokens that end it, and are no part of it."""
    most_tokens: int | None
    """That the model can read; None: any number."""

    def room(self) -> int | None:
        """The most tokens of a prompt; ConfigError: `max_new_tokens` leaves none."""
        if self.most_tokens is None:
            return None
        if self.max_new_tokens >= self.most_tokens:
            what = "so many new tokens leave the model no room for a prompt"
            allowed = f"< {self.most_tokens}, the positions of the model"
            raise ConfigError(what, where="evaluate.max_new_tokens", found=self.max_new_tokens, allowed=allowed)
        return self.most_tokens - self.max_new_tokens


def find_limits(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Limits:
    """Read the limits off a model and its tokenizer; ConfigError: they leave no room for a prompt."""
    # Chat models may end an answer with another token than a document.
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    end_ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most_tokens = positions if isinstance(positions, int) and positions > 0 else None
    limits = Limits(max_new_tokens=max_new_tokens, end_ids=frozenset(end_ids), most_tokens=most_tokens)
    limits.room()
    return limits


@dataclass
class _Row:
    ids: list[int]
    num_prompt_tokens: int
    is_done: bool = False

    def take(self, token: int, limits: Limits) -> None:
        if token in limits.end_ids:
            self.is_done = True
            return
        self.ids.append(token)
        self.is_done = len(self.ids) - self.num_prompt_tokens >= limits.max_new_tokens


def continue_prompts(
    prompts: Sequence[Sequence[int]],
    forward: Forward,
    limits: Limits,
    *,
    topology: Topology,
    rows_at_once: int,
    device: torch.device,
    uses_cache: bool = False,
) -> list[list[int]]:
    """Give each prompt's continuation, on all ranks. All ranks call it.

    The beginning of a prompt that is too long for the model is left out. Each data rank continues a share of the
    prompts, `rows_at_once` in a forward; `device` is that of tensors that travel between ranks.
    """
    room, step = limits.room(), rows_at_once * topology.data_size
    continue_rows = _generate_rows if uses_cache else _continue_rows
    continued: list[list[int]] = []
    for start in range(0, len(prompts), step):
        short = [list(prompt if room is None else prompt[-room:]) for prompt in prompts[start : start + step]]
        rows = [_Row(prompt, len(prompt)) for prompt in short]
        continue_rows(rows, forward, limits, topology, device)
        continued += [row.ids[row.num_prompt_tokens :] for row in rows]
    return continued


def _own_rows(rows: list[_Row], topology: Topology) -> list[list[int]]:
    """Give the ids of this data rank's share of the rows; copies of the first row pad the shares to equal sizes."""
    share = -(-len(rows) // topology.data_size)
    places = range(topology.data_rank * share, (topology.data_rank + 1) * share)
    return [rows[place].ids if place < len(rows) else rows[0].ids for place in places]


def _share_tokens(
    values: list[torch.Tensor], num_rows: int, num_tokens: int, topology: Topology, device: torch.device
) -> list[list[int]]:
    """Give all ranks the tokens of each row; `values`: those of this rank's own rows, empty if another one has them."""
    # Token ids are not negative, and each is known to one rank.
    tokens = torch.full((topology.data_size, num_rows, num_tokens), -1, device=device)
    if values:
        tokens[topology.data_rank] = torch.cat(values)[:num_rows]
    if dist.is_initialized():
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
    shared: list[list[int]] = tokens.flatten(0, 1).tolist()
    return shared


def _generate_rows(
    rows: list[_Row], forward: Forward, limits: Limits, topology: Topology, device: torch.device
) -> None:
    """Continue all rows in one call of `generate`, each data rank its share."""
    own = _own_rows(rows, topology)
    longest = max(map(len, own))
    batch = {
        "input_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in own]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in own]),
    }
    values = forward(batch, partial(generate_greedily, limits=limits))
    for row, tokens in zip(
        rows, _share_tokens(values, len(own), limits.max_new_tokens, topology, device), strict=False
    ):
        for token in tokens:
            if not row.is_done:
                row.take(token, limits)


def can_generate(model: PreTrainedModel) -> bool:
    """Whether `generate` continues rows of different lengths: recurrent models may read what pads them."""
    return bool(model.can_generate() and model._supports_sdpa and not model._is_stateful)


def generate_greedily(model: nn.Module, batch: Batch, *, limits: Limits) -> torch.Tensor:
    """Give the likeliest tokens behind each sequence; what stands behind a token of `end_ids` does not matter.

    Args:
        model: with all blocks.
        batch: `input_ids` and `attention_mask`, padded on the left.
        limits: where continuations end.

    Returns:
        Tokens of shape [sequences, max_new_tokens].
    """
    inner: Any = getattr(model, "module", model)
    ends = sorted(limits.end_ids)
    # The model's own may sample, or punish what comes again.
    own, inner.generation_config = inner.generation_config, GenerationConfig()
    plain = GenerationConfig(
        do_sample=False,
        max_new_tokens=limits.max_new_tokens,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    # Sharded parameters are gathered by all ranks together, until the last row of all has ended.
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    try:
        # Each length would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            whole = inner.generate(**batch, generation_config=plain, synced_gpus=is_shared)
    finally:
        inner.generation_config = own
    new = whole[:, batch["input_ids"].shape[1] :]
    return nn.functional.pad(new, (0, limits.max_new_tokens - new.shape[1]), value=plain.pad_token_id)


def _continue_rows(
    rows: list[_Row], forward: Forward, limits: Limits, topology: Topology, device: torch.device
) -> None:
    """Continue all rows token by token, each data rank its share."""
    while not all(row.is_done for row in rows):
        # The same length on all ranks and in all layouts.
        longest = max(len(row.ids) for row in rows)
        length = -(-longest // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS
        if limits.most_tokens is not None:
            length = max(longest, min(length, limits.most_tokens))
        own = _own_rows(rows, topology)
        batch = {
            "input_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in own]),
            "last": torch.tensor([len(ids) - 1 for ids in own]),
        }
        values = forward(batch, next_tokens)
        for row, (token,) in zip(rows, _share_tokens(values, len(own), 1, topology, device), strict=False):
            if not row.is_done:
                row.take(token, limits)


def next_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Give the likeliest token behind place `last` of each sequence; shape [sequences, 1].

    What stands behind that place does not matter: the model is causal.
    """
    input_ids, last = batch["input_ids"], batch["last"]
    rows = torch.arange(len(last), device=last.device)
    if "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters:
        # Logits of all places may be more than all else that the model keeps.
        places, column = torch.unique(last, return_inverse=True)
        logits = _logits(model(input_ids=input_ids, logits_to_keep=places))
        if logits.shape[1] == len(places):
            return logits[rows, column].argmax(-1, keepdim=True)
    return _logits(model(input_ids=input_ids))[rows, last].argmax(-1, keepdim=True)


def _logits(outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits


class PromptSamples(StepLines):
    """Lets the model continue fixed prompts at each evaluation, and writes the texts into samples.jsonl.

    `chat` is `data.chat`, by which the training's conversations are rendered.
    """

    def __init__(
        self,
        run_dir: Path,
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate,
        config: EvaluateConfig,
        chat: ChatConfig,
    ) -> None:
        super().__init__(run_dir / SAMPLES)
        self._tokenizer, self._generate, self._prompts = tokenizer, generate, config.prompts
        self._ids = encode_prompts(tokenizer, config.prompts, config.chat, chat)
        self._state = TrainerState()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the file."""
        self._state = state
        super().on_train_begin(args, state, control)

    def __call__(self, forward: Forward, prefix: str) -> dict[str, float | None]:
        """Continue, write and log; gives no figure."""
        step = self._state.global_step
        for prompt, ids in zip(self._prompts, self._generate(self._ids, forward), strict=True):
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            self.write({"step": step, "prompt": prompt, "text": text})
            logger.info("step %d continues %r: %r", step, prompt, text)
        return {}


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], chat: Chat, rendering: ChatConfig
) -> list[list[int]]:
    """Give the token ids of each prompt: as a user's message with the beginning of an answer, or as plain text."""
    if chat is Chat.always and not tokenizer.chat_template:
        hint = "evaluate.chat=auto, or a tokenizer with a chat template"
        raise ConfigError("the tokenizer has no chat template", where="evaluate.chat", found=chat.value, hint=hint)
    encoded = []
    if chat is Chat.never or not tokenizer.chat_template:
        for prompt in prompts:
            ids = list(tokenizer(prompt)["input_ids"])
            # Some tokenizers put an end-of-text token behind each text.
            encoded.append(ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids)
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
"""One figure, reported as `eval_<name>`, or several: `eval_<name>_<key>`. Called on rank 0."""


def exact_match(generations: Sequence[Generation]) -> float:
    """Share of the texts that are their references, but for space around them."""
    return sum(one.text.strip() == one.reference.strip() for one in generations) / len(generations)


def word_f1(generations: Sequence[Generation]) -> float:
    """Mean harmonic mean of precision and recall of words, in any order."""
    return sum(_f1(one.text.split(), one.reference.split()) for one in generations) / len(generations)


def _f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


# Known without entry points, which a checkout that is not installed anew does not have.
BUILT_IN: Mapping[str, Metric] = MappingProxyType({"exact_match": exact_match, "word_f1": word_f1})


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Find metrics by name, and import the packages that offer them."""
    taken = next(filter(_RESERVED.fullmatch, names), None)
    if taken is not None:
        what = "a metric of this name would take the place of a figure that each evaluation has"
        raise ConfigError(what, where="evaluate.metrics", found=taken, hint="another name for its entry point")
    return {name: BUILT_IN[name] if name in BUILT_IN else _load(name) for name in names}


def _load(name: str) -> Metric:
    expected = "a function of a list of hfdist.Generation that gives a number, or numbers by name"
    key, hint = "evaluate.metrics", "evaluate.metrics=[{}]"
    metric: Metric = load_plugin(GROUP, name, kind="metric", expected=expected, where=key, hint=hint, built_in=BUILT_IN)
    return metric


def compute(name: str, metric: Metric, generations: Sequence[Generation]) -> dict[str, float]:
    """Give a metric's figures by full names, without touching the generators that training draws from.

    Whatever the metric raises comes out, and a TypeError or ValueError if it does not give numbers.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            value = metric(generations)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(figure) for key, figure in value.items()}
    return {name: float(value)}


class GenerationMetrics:
    """Lets the model continue held-out prompts at each evaluation, and gives the texts to metrics.

    A metric that fails is logged, and its figure left out: the training goes on, since no loss depends on it.
    Continuations and references have at most `max_new_tokens`.
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
        """Give `eval_<metric>`, computed on rank 0, on all ranks."""
        continued = self._generate([example.prompt for example in self._examples], forward)
        figures: dict[str, float | None] = on_rank_zero(lambda: self._compute(continued))
        return {f"{prefix}_{name}": value for name, value in figures.items()}

    def _compute(self, continued: list[list[int]]) -> dict[str, float | None]:
        def text(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

        generations = [
            Generation(
                prompt=text(example.prompt), text=text(ids), reference=text(example.reference[: self._max_new_tokens])
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
