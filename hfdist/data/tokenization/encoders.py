"""Which encoder makes the tokens of which shard, and the identity of all that decides them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import ChatConfig, SourceConfig, SourceKind
from hfdist.data.sources.base import BadRow, ContentError, Shard
from hfdist.data.sources.tokenfile import check_tokenizer
from hfdist.data.tokenization.chat_encoding import ExampleEncoder
from hfdist.data.tokenization.tokenize import Encoder, tokenizer_digest

# To be counted up when `ExampleEncoder` gives other tokens or targets for the same example and settings.
_EXAMPLES = 2


class Encoders:
    """Makes tokens of documents and of examples.

    Args:
        tokenizer: must have an end-of-text token.
        chat: `data.chat`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> None:
        self._tokenizer, self._chat = tokenizer, chat

    # Each made when it is asked for: of a large tokenizer a copy takes tenths of a second, and a start asks for little.

    @cached_property
    def _text(self) -> Encoder:
        return Encoder(self._tokenizer)

    @cached_property
    def _examples(self) -> ExampleEncoder:
        return ExampleEncoder(self._tokenizer, self._chat, self._text)

    @cached_property
    def _text_digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    @cached_property
    def _examples_digest(self) -> str:
        return _digest([_EXAMPLES, self._text_digest, *_what_renders(self._tokenizer, self._chat)])

    def digest(self, *, examples: bool) -> str:
        """Hash of everything that decides which tokens, and which targets, a row becomes."""
        return self._examples_digest if examples else self._text_digest

    def check(self, shards: Sequence[tuple[str, Shard]]) -> None:
        """Try the first example, so that a tokenizer that does not do for it is found before anything is built.

        Raises:
            ConfigError: see `ExampleEncoder.encode`.
        """
        for _, shard in shards:
            if shard.gives_examples and not hasattr(shard, "token_columns"):
                (text,) = shard.read([0])
                if isinstance(text, str):
                    self.encode(shard, [0], [text])
                return

    def encode(self, shard: Shard, rows: Sequence[int], texts: Sequence[str]) -> list[NDArray[np.int32] | BadRow]:
        """Give the tokens of some rows of a shard; of an example, complements where a token is no target.

        Raises:
            ConfigError: see `ExampleEncoder.encode`.
        """
        if not shard.gives_examples:
            return list(self._text.encode(texts))
        made = self._examples.encode(texts)
        return [
            _bad(tokens, f"{shard.name}, row {row}") if isinstance(tokens, ContentError) else tokens
            for row, tokens in zip(rows, made, strict=True)
        ]


def check_token_sources(sources: Mapping[str, SourceConfig], encoders: Encoders) -> None:
    """Check that sources of token files hold what these encoders would make.

    Raises:
        ConfigError: one does not.
        DataError: its description is damaged.
    """
    for source in sources.values():
        if source.kind is SourceKind.tokens and source.path is not None:
            check_tokenizer(source.path, encoders.digest(examples=False), encoders.digest(examples=True))


def _bad(error: ContentError, where: str) -> BadRow:
    error.where = where
    return BadRow(error)


def _what_renders(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> list[Any]:
    """The template's text, wherever it comes from, and what it is given."""
    path = None if chat.template is None else Path(chat.template).expanduser()
    # One that cannot be read is said where it is needed.
    template = path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else None
    settings = dataclasses.asdict(dataclasses.replace(chat, template=None)) | {"train_on": chat.train_on.value}
    own = tokenizer.chat_template if template is None else template
    return [own, settings, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]


def _digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()
