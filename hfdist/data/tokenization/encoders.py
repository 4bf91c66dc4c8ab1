"""The encoders of a run: rows of any format become tokens, and a digest has all that decides them.

Of an example only some tokens are targets. A token that is context is stored as its complement, `~id`, which is
negative. So an example is one array, which caches, packing and cursors treat as they treat a document, and its mask
cannot come apart from it. Packing makes input_ids and labels of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import islice
from typing import Any, NamedTuple

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
"""Version of the tokens and targets that `encode_examples` makes of the same example and settings."""
_SHOWN_CHARACTERS = 80
_MOST_TRIED = 16
"""Number of shards whose first example is tried before anything is built."""


class _Begun(NamedTuple):
    """An example whose conversations are rendered, and not yet encoded."""

    answers: list[Tokens | Chat]
    """The example; of a preference with both answers, the chosen and the rejected one."""
    rejected: object
    """The example's "rejected": an answer; True: the only answer is rejected; None: none is."""


def _has_examples(shard: Shard) -> bool:
    """Whether a shard has rows that are examples, and not tokens already."""
    return shard.gives_examples and any(shard.runs) and not holds_tokens(shard)


class Encoders:
    """Makes tokens of documents and of examples of all formats; the tokenizer must have an end-of-text token."""

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
        """Section `data` of the config, for rows with labels; None: the rows have none."""
        self._pairs = PairsConfig() if pairs is None else pairs
        self.images = images
        """Processor of the rows' images; None: rows have no images."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: DataConfig, images: ImageTokens | None = None) -> Encoders:
        """Make the encoders of a run, whose config has the section `data`."""
        labelled = data if data.format in LABELLED else None
        return cls(tokenizer, data.chat, data.texts, labelled, data.pairs, images)

    def with_images(self, images: ImageTokens) -> Encoders:
        """Give the same encoders, which also take rows with images."""
        return Encoders(self._tokenizer, self._chat, self._texts, self._labelled, self._pairs, images)

    # Each encoder is made on demand: a copy of a large tokenizer takes tenths of a second, and a start needs few.

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
        # Settings count only where they are used: caches of versions without them stay.
        values = [_EXAMPLES, self._text_digest, *_what_renders(self._tokenizer, self._chat)]
        if self._texts != TextsConfig():
            values.append(dataclasses.asdict(self._texts))
        if self._labelled is not None:
            values += [plain(self._labelled.labels), self._labelled.sequence_length]
        if self._pairs != PairsConfig():
            values.append(dataclasses.asdict(self._pairs))
        target = self._rows_of_pairs.target_sample()
        if target is not None:
            values.append(target)
        if self.images is not None:
            values.append(self.images.digest)
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()

    def digest(self, *, examples: bool) -> str:
        """Give the hash of all that decides the tokens of a document, or with `examples` those of an example."""
        return self._examples_digest if examples else self._text_digest

    def check(self, shards: Iterable[Shard]) -> None:
        """Encode the first examples of some shards, before anything is built.

        ConfigError: the tokenizer or the template cannot encode them, or takes time or memory without end.
        """
        tried: list[tuple[Shard, str]] = []
        for shard in islice(filter(_has_examples, shards), _MOST_TRIED):
            (text,) = shard.read([0])
            if isinstance(text, str):
                tried.append((shard, text))

        def encode_all() -> None:
            for shard, text in tried:
                self.encode(shard, [0], [text])

        if tried:
            found = self._chat.template or f"that of {self._tokenizer.name_or_path}"
            do_apart(encode_all, where="data.chat.template", found=found)

    def encode(self, shard: Shard, rows: Sequence[int], texts: Sequence[str]) -> list[Tokens | BadRow]:
        """Give the tokens of some rows of a shard, each of shape [tokens], or why a row has none.

        `texts` are those of `rows`. ConfigError: the tokenizer or `data.chat` does not fit the rows.
        """
        if not shard.gives_examples:
            return list(self._text.encode(texts))
        made = self.encode_examples(texts)
        return [
            _bad_row(tokens, f"{shard.name}, row {row}") if isinstance(tokens, ContentError) else tokens
            for row, tokens in zip(rows, made, strict=True)
        ]

    def encode_examples(self, examples: Sequence[str]) -> list[Tokens | ContentError]:
        """Give the tokens of each example in canonical JSON, shape [tokens], or why it has none.

        A token that is no target is a complement. ConfigError: there are conversations, and the tokenizer or
        `data.chat` does not fit them.
        """
        all_begun = [self._begin_example(text) for text in examples]
        # Conversations are encoded together: a tokenizer that takes turns with a template finds the processor's cache
        # full of the other.
        answers = [answer for begun in all_begun if isinstance(begun, _Begun) for answer in begun.answers]
        chats = [answer for answer in answers if isinstance(answer, Chat)]
        encoded = iter(self._conversations.encode(chats) if chats else [])
        made: list[Tokens | ContentError] = []
        for begun in all_begun:
            if isinstance(begun, ContentError):
                made.append(begun)
                continue
            tokens = [next(encoded) if isinstance(answer, Chat) else answer for answer in begun.answers]
            made.append(_finish(tokens, begun.rejected))
        return made

    def _begin_example(self, text: str) -> _Begun | ContentError:
        """Encode an example but for its conversations, which are rendered only."""
        example = json.loads(split_columns(text)[0])
        rejected = example.pop("rejected", None)
        try:
            return _Begun([self._begin(answer) for answer in _answers(example, rejected)], rejected)
        # RecursionError: arguments of a call are nested deeper than Python goes.
        except (RefusedError, RecursionError) as error:
            what = "the chat template does not take the conversation"
            return ContentError(what, found=str(error), hint="data.chat.template for another template")
        except ContentError as error:
            return error

    def _begin(self, example: Mapping[str, Any]) -> Tokens | Chat:
        """Encode an example, or render its conversation; its keys tell its format."""
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
        if "messages" in example:
            return self._render(example)
        return self._complete(example["prompt"], example["completion"])

    def _render(self, example: Mapping[str, Any]) -> Chat:
        """Render a conversation, with the sizes of its images."""
        tools = example.get("tools") or self._chat.tools or None
        sizes: list[tuple[int, int]] = []
        for image in example.get("images", ()):
            width, height = image["size"]
            sizes.append((width, height))
        if sizes and self.images is None:
            hint = "data.images.used=true, with a model of image and text"
            raise ContentError("a row has images, and the run reads text alone", found=len(sizes), hint=hint)
        return self._conversations.render(example["messages"], tools, example.get("learned_from", 0), sizes)

    def _complete(self, prompt: str, completion: str) -> Tokens:
        """Give the tokens of a prompt, then those of its completion, which are targets.

        The prompt's tokens are always those that it has alone, as when a user asks. Where the tokens of the whole text
        begin with them, the others are the completion's. Else a token would hold letters of both, and the completion
        is tokenized by itself.
        """
        first, whole = (self._without_end(ids) for ids in self._text.raw([prompt, prompt + completion]))
        begins_with_prompt = whole[: len(first)] == first
        rest = whole[len(first) :] if begins_with_prompt else self._text.inside(completion)
        tokens = np.array([*first, *rest, self._end], dtype=np.int32)
        if self._chat.train_on is not TrainOn.all:
            tokens[: len(first)] = ~tokens[: len(first)]
        return tokens

    def _retrieve(self, query: str, documents: Sequence[str]) -> Tokens:
        """Give the tokens of a query, then those of each document, marked as rejected answers; all are targets."""
        texts = [self._texts.query_prompt + query, *(self._texts.document_prompt + text for text in documents)]
        encoded = [self._cut(tokens) for tokens in self._text.encode(texts)]
        if any(len(tokens) < 2 for tokens in encoded):
            # A text is found by its targets, and the first token of a document is none.
            raise ContentError("the tokenizer has no token for a text", found=min(texts, key=len)[:_SHOWN_CHARACTERS])
        return reduce(marks.join, map(marks.reject, encoded[1:]), encoded[0])

    def _compare(self, first: str, second: str, score: float) -> Tokens:
        """Give the tokens of both texts as of a query and its document, and the score as a third document."""
        documents = self._retrieve(first, [second])
        number = np.array([0, *of_number(score)], dtype=np.int32)
        return marks.join(documents, marks.reject(number))

    def _cut(self, tokens: Tokens) -> Tokens:
        """Cut a text to `data.texts.max_tokens`; its last token, the end of text, stays."""
        most_tokens = self._texts.max_tokens
        if most_tokens is None or len(tokens) <= most_tokens:
            return tokens
        return np.append(tokens[: most_tokens - 1], tokens[-1])

    def _without_end(self, ids: list[int]) -> list[int]:
        """Take off the end-of-text token that some tokenizers put after each text."""
        return ids[:-1] if ids and ids[-1] == self._end else ids


def _answers(example: Message, rejected: object) -> list[Message]:
    """Give an example with its chosen and with its rejected answer; one that is no pair by itself."""
    if isinstance(rejected, str):
        return [example, example | {"completion": rejected}]
    if isinstance(rejected, list):
        return [example, example | {"messages": example["messages"][: example["learned_from"]] + rejected}]
    return [example]


def _finish(tokens: Sequence[Tokens], rejected: object) -> Tokens:
    """Join the tokens of the answers of an example, with the mark of a rejected answer on which is rejected."""
    first, *others = tokens
    if rejected is None:
        return first
    if rejected is True:
        return marks.reject(first)
    (other,) = others
    return marks.join(first, marks.reject(other))


def check_token_sources(sources: Mapping[str, SourceConfig], encoders: Encoders) -> None:
    """Check that sources of token files hold the tokens that these encoders would make.

    ConfigError: they were made with another tokenizer or template. DataError: they are damaged or not finished.
    """
    for source in sources.values():
        if source.kind is SourceKind.tokens and source.path is not None:
            check_tokenizer(source.path, encoders.digest(examples=False), encoders.digest(examples=True))


def _bad_row(error: ContentError, where: str) -> BadRow:
    """Make a bad row of an error that does not name its place yet."""
    error.where = where
    return BadRow(error)


def _what_renders(tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> list[object]:
    """Give all that decides a render, for a digest: the template's text, `data.chat` and the special tokens."""
    template = None
    # A template that cannot be read raises its error where it is needed.
    with contextlib.suppress(ConfigError):
        template = None if chat.template is None else read_template(chat.template)
    settings = dataclasses.asdict(dataclasses.replace(chat, template=None)) | {"train_on": chat.train_on.value}
    if not chat.tools:
        # Caches of versions without this key stay.
        del settings["tools"]
    source = tokenizer.chat_template if template is None else template
    return [source, settings, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
