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
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from hfdist.apart import do_apart
from hfdist.config.data import ChatConfig, SourceConfig, SourceKind, TrainOn
from hfdist.data import marks
from hfdist.data.cache import digest_of
from hfdist.data.sources.base import BadRow, ContentError, Shard
from hfdist.data.sources.rows import split_columns
from hfdist.data.sources.tokenfile import check_tokenizer
from hfdist.data.tokenization.chat_template import (
    MARKS,
    ChatTemplate,
    Message,
    RefusedError,
    Span,
    Tools,
    find_turns,
    read_template,
)
from hfdist.errors import ConfigError

# Text of every kind that tokenizers treat in their own ways: to see whether two ways of calling one agree.
_SAMPLE = " Hello  world!\n\n\tdef f(x): return x**2  # naïve 日本語 🙂 e\u0301 <|endoftext|></s><s> 12345\r\n"

_WITHOUT_SCORES = ("BPE", "WordPiece", "WordLevel")
"""Kinds of models of `tokenizers` of which a copy has the same text."""

_BARE: dict[str, Any] = {"verbose": False, "split_special_tokens": True, "add_special_tokens": False}


class Encoder:
    """A tokenizer as documents need it: each ends with one end-of-text token.

    A beginning-of-text token stands in front only where the tokenizer itself puts one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._backend: Tokenizer | None = plain_backend(tokenizer)
        if self._backend is not None:
            # A text that is a special token must not forge the end of a document.
            self._backend.encode_special_tokens = True
            if self._fast([_SAMPLE]) != self._by_wrapper([_SAMPLE]):
                self._backend = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Give the tokens of documents, each of shape [tokens]; without text: none."""
        ids = iter(self.raw([text for text in texts if text]))
        return [self._with_end(next(ids)) if text else np.empty(0, dtype=np.int32) for text in texts]

    def raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Give the tokens of texts as the tokenizer does, with its own beginnings and ends."""
        return self._by_wrapper(texts) if self._backend is None else self._fast(texts)

    def inside(self, text: str) -> list[int]:
        """Give the tokens of a text that stands after another one: without a beginning, an end or a space in front."""
        before = list(self._tokenizer("\n", **_BARE)["input_ids"])
        ids = list(self._tokenizer("\n" + text, **_BARE)["input_ids"])
        # Some tokenizers put a space in front of every text; a line break that keeps its own tokens takes it instead.
        return ids[len(before) :] if ids[: len(before)] == before else list(self._tokenizer(text, **_BARE)["input_ids"])

    def _fast(self, texts: Sequence[str]) -> list[list[int]]:
        assert self._backend is not None
        # transformers' wrapper takes as long for masks and offsets as the tokenizer for tokens.
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def _by_wrapper(self, texts: Sequence[str]) -> list[list[int]]:
        return [_call(self._tokenizer, text) for text in texts]

    def _with_end(self, ids: list[int]) -> NDArray[np.int32]:
        if not ids or ids[-1] != self._end:
            ids.append(self._end)
        return np.array(ids, dtype=np.int32)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that decides the tokens of a text."""
    # Some classes do more than their vocabulary or their backend says.
    sample = _call(tokenizer, _SAMPLE)
    return digest_of([_rules(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, sample])


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # A copy takes four times as long as its text. It is made where that could differ: most classes switch truncation
    # and padding off in a call, and scores of other kinds of models lose their last digits when they are read.
    if backend.truncation or backend.padding or type(backend.model).__name__ not in _WITHOUT_SCORES:
        backend = plain_backend(tokenizer) or backend
    rules: str = backend.to_str()
    return rules


def token_dtype(tokenizer: PreTrainedTokenizerBase, *, examples: bool) -> str:
    """Name the narrowest type of a file's tokens; complements of context tokens take the upper half of four bytes."""
    return "uint16" if not examples and max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32"


def _call(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose: documents may be longer than the model's positions, since they are cut afterwards.
    return list(tokenizer(text, verbose=False, split_special_tokens=True)["input_ids"])


def text_digest(text: str) -> int:
    """Hash of a text in [0, 2**64): equal documents fall on one side of the held-out split, in every file."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"hfdist-eval").digest()
    return int.from_bytes(digest, "little")


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Give a copy of the fast tokenizer inside, if any, without truncation and padding, which documents never use."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend = type(backend).from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


# To be counted up when `encode_examples` gives other tokens or targets for the same example and settings.
_EXAMPLES = 3

Tokens = NDArray[np.int32]
_OPEN, _SHUT = "\U000ffff0", "\U000ffff1"
_QUOTES = re.compile(f"[{_OPEN}{_SHUT}]")
_OURS = re.compile(f"{MARKS.pattern}|{_QUOTES.pattern}")
_LEAF_KEYS_KEPT = ("role", "type")


_MOST_TRIED = 16
"""Shards whose first example is."""


def _has_examples(shard: Shard) -> bool:
    return shard.gives_examples and not hasattr(shard, "token_columns")


class Encoders:
    """Makes tokens of documents and of examples; the tokenizer must have an end-of-text token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> None:
        self._tokenizer, self._chat, self._end = tokenizer, chat, tokenizer.eos_token_id

    # Made on demand: a copy of a large tokenizer takes tenths of a second, and a start needs little.

    @cached_property
    def _text(self) -> Encoder:
        return Encoder(self._tokenizer)

    @cached_property
    def _conversations(self) -> _ChatEncoder:
        return _ChatEncoder(self._tokenizer, self._chat, self._text)

    @cached_property
    def _text_digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    @cached_property
    def _examples_digest(self) -> str:
        values = [_EXAMPLES, self._text_digest, *_what_renders(self._tokenizer, self._chat)]
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=12).hexdigest()

    def digest(self, *, examples: bool) -> str:
        """Hash of all that decides the tokens and targets of a row."""
        return self._examples_digest if examples else self._text_digest

    def check(self, shards: Sequence[tuple[str, Shard]]) -> None:
        """Try some examples, to find a tokenizer or a template that cannot encode them before anything is built.

        ConfigError: see `encode_examples`, or a template takes time or memory without end.
        """
        first = [
            (shard, text)
            for _, shard in [pair for pair in shards if _has_examples(pair[1])][:_MOST_TRIED]
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
        """Give the tokens of each example (see `sources/rows.py`), shape [tokens], or why there are none.

        ConfigError: there are conversations, and the tokenizer or `data.chat` does not fit them.
        """
        begun: list[list[Tokens | _Chat] | ContentError] = []
        rejected = []
        for text in examples:
            example = json.loads(split_columns(text)[0])
            rejected.append(example.pop("rejected", None))
            try:
                begun.append([self._begin(answer) for answer in _answers(example, rejected[-1])])
            except RefusedError as error:
                what = "the chat template does not take the conversation"
                begun.append(ContentError(what, found=str(error), hint="data.chat.template for another template"))
        # Together: a tokenizer that takes turns with a template finds the processor's cache full of the other.
        answers = [answer for one in begun if isinstance(one, list) for answer in one]
        chats = [answer for answer in answers if isinstance(answer, _Chat)]
        encoded = iter(self._conversations.encode(chats) if chats else [])

        def finish(answers: list[Tokens | _Chat], other: object) -> Tokens:
            tokens = [next(encoded) if isinstance(answer, _Chat) else answer for answer in answers]
            if other is True:
                return marks.reject(tokens[0])
            return tokens[0] if other is None else marks.join(tokens[0], marks.reject(tokens[1]))

        return [
            one if isinstance(one, ContentError) else finish(one, other)
            for one, other in zip(begun, rejected, strict=True)
        ]

    def _begin(self, example: Mapping[str, Any]) -> Tokens | _Chat:
        if "text" in example:
            return self._text.encode([example["text"]])[0]
        if "messages" not in example:
            return self._complete(example["prompt"], example["completion"])
        return self._conversations.render(example["messages"], example.get("tools"), example.get("learned_from", 0))

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
    own = tokenizer.chat_template if template is None else template
    return [own, settings, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]


class _Chat(NamedTuple):
    """A rendered conversation."""

    text: str
    targets: list[Span]
    quoted: list[Span]
    """Texts of special tokens that stand in messages."""
    is_answered: bool
    """Whether it ends with what the assistant says, and that is learned."""
    asks: bool = False
    """Whether it ends where the assistant is to answer: a prompt alone, whose answer is the end."""


class _ChatEncoder:
    """Renders conversations and finds their targets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig, plain: Encoder) -> None:
        self._config, self._end = config, int(tokenizer.eos_token_id)
        self._template = ChatTemplate(tokenizer, config)
        backend = plain_backend(tokenizer)
        if backend is None:
            what = "the tokenizer cannot say which token is which part of a conversation: it is not a fast one"
            found, allowed = type(tokenizer).__name__, "a fast tokenizer (tokenizer.json)"
            raise ConfigError(what, where="model.tokenizer.name", found=found, allowed=allowed)
        # It would move the offsets of white space; it adds nothing to what is encoded here.
        backend.post_processor = None
        self._backend, self._plain = backend, plain
        added = backend.get_added_tokens_decoder()
        self._added = {self._end, *added}
        self._special = {number for number, token in added.items() if token.special}
        self._special_texts = _any_of([added[number].content for number in self._special])
        texts = {token.content for token in added.values()} | {str(tokenizer.eos_token)}
        self._tokens = _any_of(texts)
        self._closed = re.compile(rf"(?:{self._tokens.pattern})\s*\Z")

    def encode(self, chats: Sequence[_Chat]) -> list[Tokens]:
        """Give the tokens of conversations, each of shape [tokens], complements where they are no targets."""
        encodings = self._backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [self._mask(chat, encoding) for chat, encoding in zip(chats, encodings, strict=True)]

    def _mask(self, chat: _Chat, encoding: Encoding) -> Tokens:
        tokens = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        is_target = _overlaps(offsets, chat.targets)
        if chat.quoted:
            tokens, is_target = self._quote(chat, tokens, offsets, is_target)
        if chat.asks or (chat.is_answered and not self._is_closed(tokens, is_target)):
            tokens, is_target = np.append(tokens, np.int32(self._end)), np.append(is_target, True)
        return np.where(is_target, tokens, ~tokens)

    def render(self, messages: list[Message], tools: Tools, learned_from: int) -> _Chat:
        """Render a conversation, and find its targets; RefusedError where the template does not take it."""
        if self._config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._config.system}, *messages]
            learned_from += 1
        written = json.dumps([messages, tools], ensure_ascii=False)
        if _OURS.search(written):
            raise RefusedError("it holds private characters of the last two planes, which are used here as marks")
        # Else a message could forge the end of a turn, and begin another one.
        wrapped = [self._wrap(messages), self._wrap(tools)]
        has_quoted = wrapped != [messages, tools]
        messages, tools = wrapped
        if learned_from >= len(messages):
            text, _, quoted_here = _unwrap(self._template.render(messages, tools, asks=True), [])
            return _Chat(text, [], quoted_here, is_answered=False, asks=True)
        said = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [k for k in said if k >= learned_from and messages[k].get("weight", 1) != 0]
        if self._config.train_on is TrainOn.last:
            learned = [k for k in learned if k == said[-1]]
        text, targets = self._find(messages, tools, said, learned)
        for name in (call["function"]["name"] for k in learned for call in messages[k].get("tool_calls", [])):
            if name not in text:
                raise RefusedError(f"it leaves out the call of {name}")
        ends_learned = bool(learned) and learned[-1] == len(messages) - 1
        quoted: list[Span] = []
        if has_quoted:
            text, targets, quoted = _unwrap(text, targets)
        if self._config.train_on is TrainOn.all:
            targets = [Span(0, len(text))]
            # The last target is whatever the template writes after the end of the turn.
            ends_learned = ends_learned and self._closed.search(text) is None
        return _Chat(text, targets, quoted, is_answered=ends_learned)

    def _find(
        self, messages: list[Message], tools: Tools, said: list[int], learned: list[int]
    ) -> tuple[str, list[Span]]:
        if self._config.train_on is TrainOn.all:
            return self._template.render(messages, tools), []
        if not self._template.marks_turns(tools):
            text = self._template.render(messages, tools)
            return text, find_turns(self._template, self._tokens, text, messages, tools, learned)
        text, marked = self._template.render_marked(messages, tools)
        spans = [Span(start, end) for start, end in marked]
        if learned == said:
            return text, spans
        turns = find_turns(self._template, self._tokens, text, messages, tools, learned)
        return text, [
            Span(max(span.start, turn.start), min(span.end, turn.end))
            for span in spans
            for turn in turns
            if max(span.start, turn.start) < min(span.end, turn.end)
        ]

    def _wrap(self, value: object) -> Any:
        """Put two private characters around the texts of special tokens in all that is written.

        RefusedError: one stands where templates look for certain words.
        """
        if isinstance(value, str):
            return self._special_texts.sub(rf"{_OPEN}\g<0>{_SHUT}", value)
        if isinstance(value, dict):
            for key in _LEAF_KEYS_KEPT:
                if isinstance(value.get(key), str) and self._special_texts.search(value[key]):
                    raise RefusedError(f"its {key} holds a special token: {value[key]!r}")
            kept = {k for k in _LEAF_KEYS_KEPT if isinstance(value.get(k), str)}
            return {self._wrap(k): item if k in kept else self._wrap(item) for k, item in value.items()}
        return [self._wrap(item) for item in value] if isinstance(value, list) else value

    def _quote(
        self, chat: _Chat, tokens: Tokens, offsets: NDArray[np.int64], is_target: NDArray[np.bool_]
    ) -> tuple[Tokens, NDArray[np.bool_]]:
        """Put the tokens of its letters in the place of each special token that a message only quotes."""
        is_quoted = _overlaps(offsets, chat.quoted) & np.isin(tokens, list(self._special))
        parts: list[tuple[list[int], bool]] = []
        for number, token in enumerate(tokens.tolist()):
            start, end = offsets[number].tolist()
            ids = self._plain.inside(chat.text[start:end]) if is_quoted[number] else [token]
            parts.append((ids, bool(is_target[number])))
        mask = [flag for ids, flag in parts for _ in ids]
        return np.array([i for ids, _ in parts for i in ids], dtype=np.int32), np.array(mask, dtype=bool)

    def _is_closed(self, tokens: Tokens, is_target: NDArray[np.bool_]) -> bool:
        """Whether a token of the tokenizer's own stands where the last turn ends, or after it."""
        targets = np.flatnonzero(is_target)
        return len(targets) == 0 or not self._added.isdisjoint(tokens[targets[-1] :].tolist())


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    # Longer ones first, since some begin with others; without any: what never matches.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character in a span; those without characters, which begin in one. Shape [tokens]."""
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    inside = np.zeros(len(offsets), dtype=bool)
    for span in spans:
        inside |= (starts < span.end) & (ends > span.start)
    return inside


def _unwrap(text: str, spans: Sequence[Span]) -> tuple[str, list[Span], list[Span]]:
    """Take the private characters out; give the text, the spans in it, and what was between the characters."""
    marks = list(_QUOTES.finditer(text))
    places = [mark.start() for mark in marks]
    moved = [Span(start - bisect_left(places, start), end - bisect_left(places, end)) for start, end in spans]
    quoted, opened = [], None
    for number, mark in enumerate(marks):
        if mark[0] == _OPEN:
            opened = mark.start() - number
        elif opened is not None:
            quoted.append(Span(opened, mark.start() - number))
            opened = None
    return _QUOTES.sub("", text), moved, quoted
