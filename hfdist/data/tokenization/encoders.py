"""Rows of shards to tokens, and the identity of all that decides them.

Of an example only some tokens are targets: a token that is context is stored as its complement, `~id`. So an example is
one array, which caches, packing and cursors treat as they treat a document, and its mask cannot come apart from it.
Complements are negative; `packing/` turns them into input_ids and labels. `data/marks.py` has all that they say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.apart import do_apart
from hfdist.config.data import (
    LABELLED,
    ChatConfig,
    DataConfig,
    PairsConfig,
    SourceConfig,
    SourceKind,
    TextsConfig,
    TrainOn,
)
from hfdist.config.plain_values import plain
from hfdist.data import marks
from hfdist.data.label_tokens import of_number
from hfdist.data.marks import Tokens
from hfdist.data.sources.base import BadRow, ContentError, Shard, holds_tokens
from hfdist.data.sources.formats import split_columns
from hfdist.data.sources.tokenfile import check_tokenizer
from hfdist.data.tokenization.chat_encoder import Chat, ChatEncoder
from hfdist.data.tokenization.chat_template import Message, RefusedError, read_template
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.data.tokenization.label_encoder import LabelEncoder
from hfdist.data.tokenization.pair_encoder import PairEncoder
from hfdist.data.tokenization.text_encoder import Encoder, tokenizer_digest
from hfdist.errors import ConfigError

_EXAMPLES = 3
"""Version of what `encode_examples` makes of the same example and settings: tokens and targets."""
_SHOWN_CHARACTERS = 80
_MOST_TRIED = 16
"""Shards whose first example is."""


def _has_examples(shard: Shard) -> bool:
    return shard.gives_examples and any(shard.runs) and not holds_tokens(shard)


class Encoders:
    """Makes tokens of documents and of examples; the tokenizer must have an end-of-text token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig,
        texts: TextsConfig | None = None,
        labelled: DataConfig | None = None,
        pairs: PairsConfig | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        self._tokenizer, self._chat, self._end = tokenizer, chat, tokenizer.eos_token_id
        self._texts = TextsConfig() if texts is None else texts
        self._labelled = labelled
        """What says how texts with labels become tokens; None: there are none."""
        self._pairs = PairsConfig() if pairs is None else pairs
        self.images = images
        """What images become; None: rows have none."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: DataConfig, images: ImageTokens | None = None) -> Encoders:
        """Make those of a run's data."""
        labelled = data if data.format in LABELLED else None
        return cls(tokenizer, data.chat, data.texts, labelled, data.pairs, images)

    def with_images(self, images: ImageTokens) -> Encoders:
        """Give those of rows with images."""
        return Encoders(self._tokenizer, self._chat, self._texts, self._labelled, self._pairs, images)

    # Made on demand: a copy of a large tokenizer takes tenths of a second, and a start needs little.

    @cached_property
    def _text(self) -> Encoder:
        return Encoder(self._tokenizer)

    @cached_property
    def _conversations(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer, self._chat, self._text, self.images)

    @cached_property
    def _with_labels(self) -> LabelEncoder:
        assert self._labelled is not None  # the format of these rows
        return LabelEncoder(self._tokenizer, self._labelled)

    @cached_property
    def _rows_of_pairs(self) -> PairEncoder:
        return PairEncoder(self._tokenizer, self._pairs)

    @cached_property
    def _text_digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    @cached_property
    def _examples_digest(self) -> str:
        values = [_EXAMPLES, self._text_digest, *_what_renders(self._tokenizer, self._chat)]
        if self._texts != TextsConfig():
            values.append(dataclasses.asdict(self._texts))
        if self._labelled is not None:
            values += [plain(self._labelled.labels), self._labelled.sequence_length]
        if self._pairs != PairsConfig():
            values.append(dataclasses.asdict(self._pairs))
        if (target := self._rows_of_pairs.target_sample()) is not None:
            values.append(target)
        if self.images is not None:
            values.append(self.images.digest)
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()

    def digest(self, *, examples: bool) -> str:
        """Hash of all that decides the tokens and targets of a row."""
        return self._examples_digest if examples else self._text_digest

    def check(self, shards: Iterable[Shard]) -> None:
        """Try some examples, to find a tokenizer or a template that cannot encode them before anything is built.

        ConfigError: see `encode_examples`, or a template takes time or memory without end.
        """
        first = [
            (shard, text)
            for shard in islice(filter(_has_examples, shards), _MOST_TRIED)
            for text in shard.read([0])
            if isinstance(text, str)
        ]
        if first:
            found = self._chat.template or f"that of {self._tokenizer.name_or_path}"
            do_apart(
                lambda: [self.encode(shard, [0], [text]) for shard, text in first],
                where="data.chat.template", found=found,
            )  # fmt: skip

    def encode(self, shard: Shard, rows: Sequence[int], texts: Sequence[str]) -> list[Tokens | BadRow]:
        """Give the tokens of some rows of a shard; of an example, complements where a token is no target.

        ConfigError: see `encode_examples`.
        """
        if not shard.gives_examples:
            return list(self._text.encode(texts))
        made = self.encode_examples(texts)
        return [
            _bad_row(tokens, f"{shard.name}, row {row}") if isinstance(tokens, ContentError) else tokens
            for row, tokens in zip(rows, made, strict=True)
        ]

    def encode_examples(self, examples: Sequence[str]) -> list[Tokens | ContentError]:
        """Give the tokens of each example (see `sources/formats.py`), shape [tokens], or why there are none.

        ConfigError: there are conversations, and the tokenizer or `data.chat` does not fit them.
        """
        begun: list[list[Tokens | Chat] | ContentError] = []
        rejected = []
        for text in examples:
            example = json.loads(split_columns(text)[0])
            rejected.append(example.pop("rejected", None))
            try:
                begun.append([self._begin(answer) for answer in _answers(example, rejected[-1])])
            # RecursionError: arguments of a call are nested deeper than Python goes.
            except (RefusedError, RecursionError) as error:
                what = "the chat template does not take the conversation"
                begun.append(ContentError(what, found=str(error), hint="data.chat.template for another template"))
            except ContentError as error:
                begun.append(error)
        # Together: a tokenizer that takes turns with a template finds the processor's cache full of the other.
        answers = [answer for one in begun if isinstance(one, list) for answer in one]
        chats = [answer for answer in answers if isinstance(answer, Chat)]
        encoded = iter(self._conversations.encode(chats) if chats else [])

        def finish(answers: list[Tokens | Chat], other: object) -> Tokens:
            tokens = [next(encoded) if isinstance(answer, Chat) else answer for answer in answers]
            if other is True:
                return marks.reject(tokens[0])
            return tokens[0] if other is None else marks.join(tokens[0], marks.reject(tokens[1]))

        return [
            one if isinstance(one, ContentError) else finish(one, other)
            for one, other in zip(begun, rejected, strict=True)
        ]

    def _begin(self, example: Mapping[str, Any]) -> Tokens | Chat:
        if "ranked" in example:
            return self._with_labels.rank(example["query"], example["ranked"])
        if "query" in example:
            return self._retrieve(example["query"], example["documents"])
        if "tags" in example:
            return self._with_labels.tag(example)
        if "label" in example:
            return self._with_labels.label(example)
        if "score" in example:
            return self._compare(example["text_a"], example["text_b"], example["score"])
        if "source" in example:
            return self._rows_of_pairs.encode(example["source"], example["target"])
        if "text" in example:
            return self._text.encode([example["text"]])[0]
        if "messages" not in example:
            return self._complete(example["prompt"], example["completion"])
        tools = example.get("tools") or self._chat.tools or None
        sizes = [(width, height) for width, height in (one["size"] for one in example.get("images", ()))]
        if sizes and self.images is None:
            hint = "data.images.used=true, with a model of image and text"
            raise ContentError("a row has images, and the run reads text alone", found=len(sizes), hint=hint)
        return self._conversations.render(example["messages"], tools, example.get("learned_from", 0), sizes)

    def _complete(self, prompt: str, completion: str) -> Tokens:
        """Give a prompt's own tokens, then its completion's, which are targets.

        Tokens of the whole text, if the prompt's are the first of them; else a token would hold letters of both, and
        the completion is tokenized by itself: so the prompt's tokens are always those that a user's prompt has.
        """
        first, whole = self._text.raw([prompt, prompt + completion])
        first, whole = self._open(first), self._open(whole)
        rest = whole[len(first) :] if whole[: len(first)] == first else self._text.inside(completion)
        tokens = np.array([*first, *rest, self._end], dtype=np.int32)
        if self._chat.train_on is not TrainOn.all:
            tokens[: len(first)] = ~tokens[: len(first)]
        return tokens

    def _retrieve(self, query: str, documents: Sequence[str]) -> Tokens:
        """Give a query's tokens, then those of each document with the mark of a rejected answer: all are targets."""
        texts = [self._texts.query_prompt + query, *(self._texts.document_prompt + text for text in documents)]
        encoded = [self._cut(tokens) for tokens in self._text.encode(texts)]
        if any(len(tokens) < 2 for tokens in encoded):
            # The first token of a document is no target, and by its targets a text is known.
            raise ContentError("the tokenizer has no token for a text", found=min(texts, key=len)[:_SHOWN_CHARACTERS])
        return reduce(marks.join, map(marks.reject, encoded[1:]), encoded[0])

    def _compare(self, first: str, second: str, score: float) -> Tokens:
        """Give the tokens of both texts as those of a query and its text, and the score as a third document."""
        documents = self._retrieve(first, [second])
        number = np.array([0, *of_number(score)], dtype=np.int32)
        return marks.join(documents, marks.reject(number))

    def _cut(self, tokens: Tokens) -> Tokens:
        most = self._texts.max_tokens
        return tokens if most is None or len(tokens) <= most else np.append(tokens[: most - 1], tokens[-1])

    def _open(self, ids: list[int]) -> list[int]:
        """Token ids without the end-of-text token that some tokenizers put after each text."""
        return ids[:-1] if ids and ids[-1] == self._end else ids


def _answers(example: Message, rejected: object) -> list[Message]:
    """Give the forms of both answers of a preference; the only one of another example."""
    if isinstance(rejected, str):
        return [example, example | {"completion": rejected}]
    if isinstance(rejected, list):
        return [example, example | {"messages": example["messages"][: example["learned_from"]] + rejected}]
    return [example]


def check_token_sources(sources: Mapping[str, SourceConfig], encoders: Encoders) -> None:
    """Check that sources of token files hold what these encoders would make; ConfigError or DataError if not."""
    for source in sources.values():
        if source.kind is SourceKind.tokens and source.path is not None:
            check_tokenizer(source.path, encoders.digest(examples=False), encoders.digest(examples=True))


def _bad_row(error: ContentError, where: str) -> BadRow:
    error.where = where
    return BadRow(error)


def _what_renders(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> list[object]:
    """The template's text, wherever it comes from, and what it is given."""
    template = None
    # One that cannot be read is said where it is needed.
    with contextlib.suppress(ConfigError):
        template = None if chat.template is None else read_template(chat.template)
    settings = dataclasses.asdict(dataclasses.replace(chat, template=None)) | {"train_on": chat.train_on.value}
    if not chat.tools:
        # Caches of versions without this key stay.
        del settings["tools"]
    own = tokenizer.chat_template if template is None else template
    return [own, settings, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
