"""A frozen reward model as a reward: the score that it gives to the last token of a prompt with its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from hfdist.config.paths import expand_user
from hfdist.config.task import SCORE, Head
from hfdist.data.tokenization.text_encoder import Encoder
from hfdist.errors import ConfigError, DataError
from hfdist.models.frozen import SAFELY, find_frozen, read_frozen, read_tokenizer
from hfdist.models.names.weight_names import read_names
from hfdist.models.partitioning import Partitioning
from hfdist.models.position_limit import most_positions
from hfdist.rewards import Generation
from hfdist.tune.reward import token_scores

_KEY = "task.reward_model"
_ALLOWED = "the folder of a model for sequence classification with one label, in safetensors, and its tokenizer"
_LENGTHS = f"task.max_new_tokens or data.sequence_length, or another {_KEY}"
_HINT = f"{_KEY}=RUN/model, of a run with task=reward and without an adapter"


def check_reward_model(path: str) -> None:
    """Check the small files of the reward model in a folder, before there is a process group.

    Raises:
        ConfigError: the folder holds no model in safetensors, one without a layer that gives one score, or no tokenizer
            that fits it.
    """
    folder = expand_user(path)
    config = find_frozen(path, where=_KEY, allowed=_ALLOWED, hint=_HINT)
    names = read_names(AutoModelForSequenceClassification, folder, where=_KEY, head=Head.tokens, **SAFELY)
    if any(name.startswith(f"{SCORE}.") for name in names.missing):
        what, found = "the model has no layer that scores an answer", f"{path}, without {SCORE}.weight"
        raise ConfigError(what, where=_KEY, found=found, allowed=_ALLOWED, hint=_HINT)
    names.check(where=_KEY, name=path, hint=_HINT)
    if config.num_labels != 1:
        what, found = "the model tells classes apart, and gives no score", f"{path}, of {config.num_labels} labels"
        raise ConfigError(what, where=_KEY, found=found, allowed=_ALLOWED, hint=_HINT)
    num_tokens = len(read_tokenizer(path, where=_KEY))
    num_known = config.get_text_config().vocab_size
    if num_tokens > num_known:
        what = "the tokenizer has more tokens than the reward model knows"
        found = f"{path}, {num_tokens:,} tokens and a model of {num_known:,}"
        raise ConfigError(what, where=_KEY, found=found, allowed=_ALLOWED, hint=_HINT)


def check_positions(path: str, tokenizer: PreTrainedTokenizerBase, *, longest: int, max_new_tokens: int) -> None:
    """Check that a reward model can read the longest answer; of one with another vocabulary that is not known yet.

    Args:
        path: folder of the model, checked by `check_reward_model`.
        tokenizer: tokenizer of the model that is trained.
        longest: most tokens of a prompt with its answer.
        max_new_tokens: most tokens of an answer.

    Raises:
        ConfigError: it has fewer positions.
    """
    positions = most_positions(find_frozen(path, where=_KEY, allowed=_ALLOWED, hint=_HINT))
    if positions is None or positions >= longest or not _has_vocabulary(read_tokenizer(path, where=_KEY), tokenizer):
        return
    room = positions - max_new_tokens
    hint = f"data.sequence_length={room}" if room > 0 else f"a lower {_LENGTHS}"
    raise ConfigError(
        "a prompt with its answer may be longer than the reward model has positions",
        where=_KEY,
        found=f"{path}, with {positions:,} positions, for up to {longest:,} tokens",
        allowed=f"data.sequence_length + task.max_new_tokens <= {positions}",
        hint=hint,
    )


def _has_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return tokenizer.get_vocab() == other.get_vocab()


class LearnedReward:
    """The frozen reward model, whole on each rank that scores; a rank reads it at its first score.

    A reward model that has the tokens of the trained model reads tokens. One with other tokens reads the texts, without
    the marks of a chat template.

    Args:
        path: folder of the model and its tokenizer, checked by `check_reward_model`.
        tokenizer: tokenizer of the model that is trained.
        layout: layout in which that model is trained.
        arguments: arguments of the run: device, precision, and rows of a forward.
    """

    def __init__(
        self, path: str, tokenizer: PreTrainedTokenizerBase, *, layout: Partitioning, arguments: TrainingArguments
    ) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._layout, self._arguments = layout, arguments

    def __call__(self, generations: Sequence[Generation]) -> list[float]:
        """Score each generation, as a `hfdist.rewards.registry.Score` does."""
        rows = [self._encode(generation) for generation in generations]
        rows_at_once = self._arguments.per_device_eval_batch_size
        scores: list[float] = []
        for first in range(0, len(rows), rows_at_once):
            scores += self._score_rows(rows[first : first + rows_at_once])
        return scores

    @cached_property
    def _model(self) -> PreTrainedModel:
        model = read_frozen(
            AutoModelForSequenceClassification,
            self._path,
            where=_KEY,
            layout=self._layout,
            arguments=self._arguments,
        )
        if model.config.pad_token_id is None:
            # The model asks for it, though padding comes after the token that is read.
            model.config.pad_token_id = 0
        return model

    @cached_property
    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        return read_tokenizer(self._path, where=_KEY)

    @cached_property
    def _own_encoder(self) -> Encoder | None:
        """Encodes texts anew; None: both models have the same vocabulary."""
        own = self._own_tokenizer
        return None if _has_vocabulary(own, self._tokenizer) else Encoder(own)

    def _encode(self, generation: Generation) -> list[int]:
        """Give the tokens of prompt and answer that the reward model reads."""
        encoder, tokens = self._own_encoder, list(generation.token_ids)
        if encoder is None:
            return tokens
        end = self._own_tokenizer.eos_token_id
        [prompt] = encoder.raw([generation.prompt])
        # Some tokenizers put an end-of-text token after each text.
        if prompt and prompt[-1] == end:
            prompt = prompt[:-1]
        encoded = [*prompt, *encoder.inside(generation.text)]
        has_ended = bool(tokens) and tokens[-1] in self._tokenizer.all_special_ids
        if has_ended and end is not None:
            encoded.append(end)
        return encoded

    @torch.no_grad()
    def _score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        device, width = self._arguments.device, max(map(len, rows))
        positions = most_positions(self._model.config)
        if positions is not None and width > positions:
            what = "a prompt with its answer is longer than the reward model has positions"
            length, allowed = f"{self._path}, for {width:,} of its tokens", f"<= {positions:,} tokens"
            raise DataError(what, where=_KEY, found=length, allowed=allowed, hint=f"a lower {_LENGTHS}")
        # Any token fills up: it comes after the one that is scored.
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        places = torch.arange(width, device=device).expand_as(ids)
        scores = token_scores(self._model, {"input_ids": ids, "position_ids": places})
        last = torch.tensor([[len(row) - 1] for row in rows], device=device)
        last_scores: list[float] = scores.gather(1, last)[:, 0].float().tolist()
        return last_scores
