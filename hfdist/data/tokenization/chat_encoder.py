"""Conversations to tokens: rendered by the chat template, with the tokens of what the assistant says as targets."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import ChatConfig, TrainOn
from hfdist.data.marks import IMAGE, Tokens
from hfdist.data.tokenization.chat_template import ChatTemplate, Message, RefusedError, Tools
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.data.tokenization.text_encoder import Encoder, plain_backend
from hfdist.data.tokenization.turns import MARKS, Span, find_turns
from hfdist.errors import ConfigError

_OPEN, _SHUT = "\U000ffff0", "\U000ffff1"
_QUOTES = re.compile(f"[{_OPEN}{_SHUT}]")
_OURS = re.compile(f"{MARKS.pattern}|{_QUOTES.pattern}")
_LEAF_KEYS_KEPT = ("role", "type")


class Chat(NamedTuple):
    """A rendered conversation."""

    text: str
    targets: list[Span]
    quoted: list[Span]
    """Texts of special tokens that stand in messages."""
    is_answered: bool
    """Whether it ends with what the assistant says, and that is learned."""
    asks: bool = False
    """Whether it ends where the assistant is to answer: a prompt alone, whose answer is the end."""
    images: Sequence[Span] = ()
    """What stands in the place of images."""


class ChatEncoder:
    """Renders conversations and finds their targets."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: ChatConfig,
        plain: Encoder,
        images: ImageTokens | None = None,
    ) -> None:
        self._config, self._end, self._images = config, int(tokenizer.eos_token_id), images
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
        if images is not None:
            self._special |= {number for number, token in added.items() if token.content == images.token}
        self._special_texts = _any_of([added[number].content for number in self._special])
        texts = {token.content for token in added.values()} | {str(tokenizer.eos_token)}
        self._tokens = _any_of(texts)
        self._closed = re.compile(rf"(?:{self._tokens.pattern})\s*\Z")

    def encode(self, chats: Sequence[Chat]) -> list[Tokens]:
        """Give the tokens of conversations, each of shape [tokens], complements where they are no targets."""
        encodings = self._backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [self._mask(chat, encoding) for chat, encoding in zip(chats, encodings, strict=True)]

    def _mask(self, chat: Chat, encoding: Encoding) -> Tokens:
        tokens = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        is_of_image = _overlaps(offsets, chat.images)
        is_target = _overlaps(offsets, chat.targets) & ~is_of_image
        if self._images is not None:
            is_feature = is_of_image & np.isin(tokens, self._images.ids)
            tokens = np.where(is_feature, tokens | IMAGE, tokens).astype(np.int32)
        if chat.quoted:
            tokens, is_target = self._quote(chat, tokens, offsets, is_target)
        if chat.asks or (chat.is_answered and not self._is_closed(tokens, is_target)):
            tokens, is_target = np.append(tokens, np.int32(self._end)), np.append(is_target, True)
        return np.where(is_target, tokens, ~tokens)

    def render(
        self, messages: list[Message], tools: Tools, learned_from: int, sizes: Sequence[tuple[int, int]] = ()
    ) -> Chat:
        """Render a conversation, and find its targets; `sizes` are the widths and heights of its images.

        RefusedError: the template does not take it.
        """
        return self._expand(self._render(messages, tools, learned_from), sizes)

    def _expand(self, chat: Chat, sizes: Sequence[tuple[int, int]]) -> Chat:
        """Put what the processor writes for each image in the place of what the template writes for one."""
        if not sizes:
            return chat
        assert self._images is not None
        written = [Span(*one.span()) for one in re.finditer(re.escape(self._images.token), chat.text)]
        quoted = {span.start for span in chat.quoted}
        places = [span for span in written if span.start not in quoted]
        if len(places) != len(sizes):
            what = f"the template writes {self._images.token!r} {len(places)} times for {len(sizes)} images"
            raise RefusedError(what)
        parts, images, last, length = [], [], 0, 0
        for span, size in zip(places, sizes, strict=True):
            expansion = self._images.expansion(size)
            parts += [chat.text[last : span.start], expansion]
            length += span.start - last + len(expansion)
            images.append(Span(length - len(expansion), length))
            last = span.end
        stops = [span.end for span in places]
        # Item n is how far that has moved which follows n images.
        shifts = [0, *(new.end - old.end for new, old in zip(images, places, strict=True))]

        def move(place: int) -> int:
            return place + shifts[bisect_right(stops, place)]

        def moved(spans: Sequence[Span]) -> list[Span]:
            return [Span(move(start), move(end)) for start, end in spans]

        text = "".join([*parts, chat.text[last:]])
        return chat._replace(text=text, targets=moved(chat.targets), quoted=moved(chat.quoted), images=images)

    def _render(self, messages: list[Message], tools: Tools, learned_from: int) -> Chat:
        """Render a conversation with the places of images as the template writes them; see `render`."""
        if self._config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._config.system}, *messages]
            learned_from += 1
        written = json.dumps([messages, tools], ensure_ascii=False)
        if _OURS.search(written):
            raise RefusedError("it holds private characters of the last two planes, which are used here as marks")
        # A message that is not quoted could forge the end of a turn, and begin another one.
        wrapped = [self._wrap(messages), self._wrap(tools)]
        has_quoted = wrapped != [messages, tools]
        messages, tools = wrapped
        if learned_from >= len(messages):
            text, _, quoted_here = _unwrap(self._template.render(messages, tools, asks=True), [])
            return Chat(text, [], quoted_here, is_answered=False, asks=True)
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
        return Chat(text, targets, quoted, is_answered=ends_learned)

    def _find(
        self, messages: list[Message], tools: Tools, said: list[int], learned: list[int]
    ) -> tuple[str, list[Span]]:
        """Give the text, and in it the turns to learn: of some templates marked by themselves, of others looked for."""
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
        self, chat: Chat, tokens: Tokens, offsets: NDArray[np.int64], is_target: NDArray[np.bool_]
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
