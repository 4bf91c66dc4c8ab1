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
"""Private characters around the text of a special token that a message only quotes."""
_QUOTES = re.compile(f"[{_OPEN}{_SHUT}]")
_RESERVED = re.compile(f"{MARKS.pattern}|{_QUOTES.pattern}")
"""Private characters with a meaning here, which no conversation may hold."""
_UNQUOTED_KEYS = ("role", "type")
"""Keys whose values templates compare with words of their own, so that nothing may be put around them."""


class Chat(NamedTuple):
    """A rendered conversation; its spans are of characters."""

    text: str
    targets: list[Span]
    """Spans whose tokens are learned."""
    quoted: list[Span]
    """Spans of the texts of special tokens that messages only quote."""
    is_answered: bool
    """Whether the conversation ends with what the assistant says, and that is learned."""
    asks: bool = False
    """Whether the conversation is a prompt alone, which ends where the assistant is to answer."""
    images: Sequence[Span] = ()
    """Spans of the texts that stand in the place of images."""


class ChatEncoder:
    """Renders conversations with their targets, and gives the tokens of rendered ones.

    ConfigError: the tokenizer is not a fast one, or there is no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: ChatConfig,
        plain: Encoder,
        images: ImageTokens | None = None,
    ) -> None:
        self._config, self._images = config, images
        self._end = int(tokenizer.eos_token_id)
        self._template = ChatTemplate(tokenizer, config)
        backend = plain_backend(tokenizer)
        if backend is None:
            what = "the tokenizer cannot say which token is which part of a conversation: it is not a fast one"
            found, allowed = type(tokenizer).__name__, "a fast tokenizer (tokenizer.json)"
            raise ConfigError(what, where="model.tokenizer.name", found=found, allowed=allowed)
        # A post-processor would move the offsets of white space, and it has no special token to add here.
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
        # A text that ends with a token, but for white space.
        self._closed = re.compile(rf"(?:{self._tokens.pattern})\s*\Z")

    def encode(self, chats: Sequence[Chat]) -> list[Tokens]:
        """Give the tokens of conversations, each of shape [tokens]; a token that is no target is a complement."""
        encodings = self._backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        return [self._mask(chat, encoding) for chat, encoding in zip(chats, encodings, strict=True)]

    def _mask(self, chat: Chat, encoding: Encoding) -> Tokens:
        """Mark which tokens of a conversation are targets and images, and end it where the template has not."""
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
            tokens = np.append(tokens, np.int32(self._end))
            is_target = np.append(is_target, True)
        return np.where(is_target, tokens, ~tokens)

    def render(
        self, messages: list[Message], tools: Tools, learned_from: int, sizes: Sequence[tuple[int, int]] = ()
    ) -> Chat:
        """Render a conversation, and find its targets.

        `learned_from` is the number of the first message that may be learned, and `sizes` has the width and the height
        of each image in pixels. RefusedError: the template does not take the conversation.
        """
        return self._expand(self._render(messages, tools, learned_from), sizes)

    def _expand(self, chat: Chat, sizes: Sequence[tuple[int, int]]) -> Chat:
        """Replace the one token that the template writes for each image by what the processor writes for its size.

        text     a <image> b <image> c           places (stops 9, 19)
        text     a <image><image> b <image> c    images; what follows image n has moved by shifts[n]
        """
        if not sizes:
            return chat
        assert self._images is not None
        written = [Span(*one.span()) for one in re.finditer(re.escape(self._images.token), chat.text)]
        quoted = {span.start for span in chat.quoted}
        places = [span for span in written if span.start not in quoted]
        if len(places) != len(sizes):
            what = f"the template writes {self._images.token!r} {len(places)} times for {len(sizes)} images"
            raise RefusedError(what)
        parts: list[str] = []
        images: list[Span] = []
        shifts = [0]
        stop = 0
        for span, size in zip(places, sizes, strict=True):
            expansion = self._images.expansion(size)
            parts += [chat.text[stop : span.start], expansion]
            start = span.start + shifts[-1]
            images.append(Span(start, start + len(expansion)))
            stop = span.end
            shifts.append(images[-1].end - span.end)
        stops = [span.end for span in places]

        def move(place: int) -> int:
            return place + shifts[bisect_right(stops, place)]

        def moved(spans: Sequence[Span]) -> list[Span]:
            return [Span(move(start), move(end)) for start, end in spans]

        text = "".join([*parts, chat.text[stop:]])
        return chat._replace(text=text, targets=moved(chat.targets), quoted=moved(chat.quoted), images=images)

    def _render(self, messages: list[Message], tools: Tools, learned_from: int) -> Chat:
        """Render a conversation, in which each image is still the one token that the template writes."""
        if self._config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._config.system}, *messages]
            learned_from += 1
        written = json.dumps([messages, tools], ensure_ascii=False)
        if _RESERVED.search(written):
            raise RefusedError("it holds private characters of the last two planes, which are used here as marks")
        # A message with an unmarked special token could forge the end of a turn, and begin another one.
        quoted_messages, quoted_tools = self._wrap(messages), self._wrap(tools)
        has_quoted = quoted_messages != messages or quoted_tools != tools
        messages, tools = quoted_messages, quoted_tools
        if learned_from >= len(messages):
            prompt = _unwrap(self._template.render(messages, tools, asks=True), [])
            return Chat(prompt.text, [], prompt.quoted, is_answered=False, asks=True)
        # Numbers of messages: those of the assistant, and those of them that are learned.
        said = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [k for k in said if k >= learned_from and messages[k].get("weight", 1) != 0]
        if self._config.train_on is TrainOn.last:
            learned = [k for k in learned if k == said[-1]]
        text, targets = self._find_targets(messages, tools, said, learned)
        _check_calls(text, [messages[k] for k in learned])
        ends_learned = bool(learned) and learned[-1] == len(messages) - 1
        quoted: list[Span] = []
        if has_quoted:
            text, targets, quoted = _unwrap(text, targets)
        if self._config.train_on is TrainOn.all:
            targets = [Span(0, len(text))]
            # All is a target, also what the template writes after the end of the turn.
            ends_learned = ends_learned and self._closed.search(text) is None
        return Chat(text, targets, quoted, is_answered=ends_learned)

    def _find_targets(
        self, messages: list[Message], tools: Tools, said: list[int], learned: list[int]
    ) -> tuple[str, list[Span]]:
        """Render messages, and give the text with the spans of the learned turns.

        Some templates mark turns themselves; of others, turns are looked for. `said` are the numbers of the
        assistant's messages, and `learned` those that are learned.
        """
        if self._config.train_on is TrainOn.all:
            return self._template.render(messages, tools), []
        if not self._template.marks_turns(tools):
            text = self._template.render(messages, tools)
            return text, find_turns(self._template, self._tokens, text, messages, tools, learned)
        text, marked = self._template.render_marked(messages, tools)
        spans = [Span(start, end) for start, end in marked]
        if learned == said:
            return text, spans
        # The template marks all turns: those that are learned are found, and cut to what it marks.
        targets: list[Span] = []
        turns = find_turns(self._template, self._tokens, text, messages, tools, learned)
        for span in spans:
            for turn in turns:
                start, end = max(span.start, turn.start), min(span.end, turn.end)
                if start < end:
                    targets.append(Span(start, end))
        return text, targets

    def _wrap(self, value: Any) -> Any:
        """Put two private characters around the texts of special tokens in a JSON value, at every depth.

        RefusedError: such a text stands where templates look for certain words.
        """
        if isinstance(value, str):
            return self._special_texts.sub(rf"{_OPEN}\g<0>{_SHUT}", value)
        if isinstance(value, list):
            return [self._wrap(item) for item in value]
        if not isinstance(value, dict):
            return value
        wrapped: dict[str, Any] = {}
        for key, item in value.items():
            if key in _UNQUOTED_KEYS and isinstance(item, str):
                if self._special_texts.search(item):
                    raise RefusedError(f"its {key} holds a special token: {item!r}")
                wrapped[key] = item
            else:
                wrapped[self._wrap(key)] = self._wrap(item)
        return wrapped

    def _quote(
        self, chat: Chat, tokens: Tokens, offsets: NDArray[np.int64], is_target: NDArray[np.bool_]
    ) -> tuple[Tokens, NDArray[np.bool_]]:
        """Replace special tokens that messages only quote by the tokens of their letters; give tokens and targets."""
        is_quoted = _overlaps(offsets, chat.quoted) & np.isin(tokens, list(self._special))
        ids: list[int] = []
        mask: list[bool] = []
        for number, token in enumerate(tokens.tolist()):
            letters = [token]
            if is_quoted[number]:
                start, end = offsets[number].tolist()
                letters = self._plain.inside(chat.text[start:end])
            ids += letters
            mask += [bool(is_target[number])] * len(letters)
        return np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)

    def _is_closed(self, tokens: Tokens, is_target: NDArray[np.bool_]) -> bool:
        """Whether a special or added token stands at the last target, or after it, so that the turn has an end."""
        targets = np.flatnonzero(is_target)
        return len(targets) == 0 or not self._added.isdisjoint(tokens[targets[-1] :].tolist())


def _check_calls(text: str, messages: Sequence[Message]) -> None:
    """Raise a RefusedError where a render lacks a tool call of these messages."""
    for message in messages:
        for call in message.get("tool_calls", []):
            name = call["function"]["name"]
            if name not in text:
                raise RefusedError(f"it leaves out the call of {name}")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Make the pattern that matches any of some texts; without texts, it never matches."""
    # Longer texts come first, since some begin with others.
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Whether each token has a character in one of the spans, or has none and begins in one; shape [tokens].

    `offsets` has the first character of each token and the one after its last; shape [tokens, 2].
    """
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    inside = np.zeros(len(offsets), dtype=bool)
    for span in spans:
        inside |= (starts < span.end) & (ends > span.start)
    return inside


class _Unwrapped(NamedTuple):
    """A render without the private characters around quoted texts."""

    text: str
    spans: list[Span]
    """The given spans, moved."""
    quoted: list[Span]
    """Spans of what stood between the characters."""


def _unwrap(text: str, spans: Sequence[Span]) -> _Unwrapped:
    """Take the private characters out of a render, and move `spans` to where they are then."""
    marks = list(_QUOTES.finditer(text))
    places = [mark.start() for mark in marks]
    moved = [Span(start - bisect_left(places, start), end - bisect_left(places, end)) for start, end in spans]
    quoted: list[Span] = []
    opened: int | None = None
    # `number` private characters stand before each, and are taken out.
    for number, mark in enumerate(marks):
        if mark[0] == _OPEN:
            opened = mark.start() - number
        elif opened is not None:
            quoted.append(Span(opened, mark.start() - number))
            opened = None
    return _Unwrapped(_QUOTES.sub("", text), moved, quoted)
