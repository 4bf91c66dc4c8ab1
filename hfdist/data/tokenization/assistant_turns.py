"""Finds what the assistant says in a rendered conversation: from behind the generation prompt to the end-of-turn token.

    <|im_start|>user  Why?<|im_end|>  <|im_start|>assistant  <think></think>Because.<|im_end|>
                      S   E                                                 S       E
                                      '---- prompt --------''- learned ----------------------'

Templates trim, rewrite and reorder what they are given, so nothing is looked for by its words. Messages are rendered
once more with private characters (S, E) around their contents; where that changes more than these, it is not used. A
message with more than a content (tool calls, reasoning) is replaced by the two characters alone: what that render and
the original have in common before and behind is not of the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hfdist.data.tokenization.chat_template import ChatTemplate, Message, RefusedError, Tools

MARKS = re.compile("[\U00100000-\U0010fffd]")
"""Characters of ours; a conversation may hold none."""
_FIRST_MARK, _MOST_MESSAGES = 0x100000, 0x7FFE
_SENTINEL = chr(_FIRST_MARK + 0xFFFC) + chr(_FIRST_MARK + 0xFFFD)
T = TypeVar("T")
_PLAIN_KEYS = {"role", "content", "weight", "name"}
_BODY_KEYS = {"tool_calls", "reasoning_content", "reasoning", "thinking"}


class Span(NamedTuple):
    """Characters of a render."""

    start: int
    end: int


class _Marked(NamedTuple):
    """Where contents begin and end in a render without marks, by message."""

    starts: Mapping[int, int]
    ends: Mapping[int, int]


class _Prompt(NamedTuple):
    """What a template writes for the assistant to go on; may be nothing."""

    text: str
    space: str
    """White space at its end, or, where it is nothing, at the end of what stands before."""


class TurnFinder:
    """Finds the assistant's turns.

    Args:
        template: that rendered them.
        tokens: matches the text of a token that the tokenizer has by itself, such as `<|im_end|>`.
    """

    def __init__(self, template: ChatTemplate, tokens: re.Pattern[str]) -> None:
        self._template, self._tokens = template, tokens

    def find(self, text: str, messages: Sequence[Message], tools: Tools, wanted: Sequence[int]) -> list[Span]:
        """Give the spans of some assistant messages; of one that the template leaves out, none.

        Args:
            text: the conversation as the template renders it.
            messages: of the conversation.
            tools: of the conversation.
            wanted: numbers of messages.

        Raises:
            RefusedError: a turn cannot be told apart from the others.
        """
        if len(messages) > _MOST_MESSAGES:
            raise RefusedError(f"{len(messages)} messages are more than {_MOST_MESSAGES}")
        conversation = _Conversation(self._template, text, messages, tools)
        spans = [self._by_marks(conversation, k) or self._by_difference(conversation, k) for k in wanted]
        return [span for span in spans if span is not None]

    def _by_marks(self, of: _Conversation, k: int) -> Span | None:
        """A turn that is only a content, behind a message that is only a content."""
        message, marked = of.messages[k], of.marked
        if marked is None:
            return None
        is_plain = k > 0 and message.keys() <= _PLAIN_KEYS and not of.messages[k - 1].keys() & _BODY_KEYS
        # Templates move system messages.
        if not is_plain or of.messages[k - 1]["role"] == "system" or k not in marked.ends or k - 1 not in marked.ends:
            return None
        body, end, low = marked.starts.get(k), marked.ends[k], marked.ends[k - 1]
        if not low <= (end if body is None else body) <= end:
            return None
        prompt, space = self._prompt(of, k)
        at = of.text.find(prompt, low, end if body is None else body) if prompt else -1
        content = message["content"]
        if at >= 0:
            start = at + len(prompt)
        elif body is not None:
            own = content[: len(content) - len(content.lstrip())]
            start = _back_over(of.text, body, own) if prompt else _behind(of.text, low, body, space)
        else:
            return None
        behind = content[len(content.rstrip()) :]
        return Span(start, self._close(of, k, end, behind))

    def _by_difference(self, of: _Conversation, k: int) -> Span | None:
        """Any turn, by what changes in the render when two private characters stand in its place."""
        reasons = [""]
        for stop, other, is_call in _replacements(of.messages, k):
            try:
                whole = of.text if stop == len(of.messages) else of.render(of.messages[:stop])
                replaced = of.render([*of.messages[:k], other, *of.messages[k + 1 : stop]])
            except RefusedError as error:
                reasons.append(f": {error}")
                continue
            if _SENTINEL not in replaced:
                if replaced == whole and not is_call:
                    return None
                continue
            before = _common(whole, replaced)
            behind = _common(whole[before:][::-1], replaced[before:][::-1])
            start, end = self._begin(of, k, before), len(whole) - behind
            if is_call and start == before:
                # The call's name stands before its arguments, and nothing tells where it begins.
                continue
            end = self._close_call(of, k, end) if is_call else self._close(of, k, end)
            bounds = of.bounds(k)
            if bounds is not None and bounds[0] <= start <= end <= bounds[1] and of.text.startswith(whole[:end]):
                return Span(start, end)
        raise RefusedError(f"what message {k} says cannot be told apart in what the template writes{reasons[-1]}")

    def _begin(self, of: _Conversation, k: int, body: int) -> int:
        """Where a turn begins whose first own character is at `body`: behind the generation prompt, if it is there."""
        prompt, space = self._prompt(of, k)
        low, _ = of.bounds(k) or (0, 0)
        if not prompt:
            return _behind(of.text, low, body, space)
        at = of.text.rfind(prompt, low, body)
        return at + len(prompt) if at >= 0 else body

    def _close(self, of: _Conversation, k: int, end: int, behind: str = "") -> int:
        """Where a turn ends whose content ends at `end`, but for white space `behind`: with its end-of-turn token."""
        closings = self._closings(of, k)
        for space in dict.fromkeys((behind, "")):
            for closing in closings:
                if of.text.startswith(space + closing, end):
                    return end + len(space + closing)
            # Templates that close the last turn in another way than those before close these as they close others'.
            token = self._tokens.match(of.text, end + len(space)) if any(closings) else None
            if token is not None and of.closes_others(token[0]):
                return token.end()
        # What two ways of closing have in common may begin inside a token.
        inside = [token for token in self._tokens.finditer(of.text, max(end - 64, 0)) if token.start() < end]
        return max([token.end() for token in inside if token.end() > end], default=end)

    def _close_call(self, of: _Conversation, k: int, end: int) -> int:
        """Where a turn ends whose last call has its last own character before `end`: with the next closing or token."""
        _, high = of.bounds(k) or (0, 0)
        found = [of.text.find(closing, end, high) + len(closing) for closing in self._closings(of, k) if closing]
        found = [at for at in found if at > end]
        token = self._tokens.search(of.text, end, high)
        return min(found) if found else token.end() if token is not None else end

    def _prompt(self, of: _Conversation, k: int) -> _Prompt:
        """What the template appends to the messages before k for the assistant to go on."""
        key = (of.messages[k - 1]["role"], "tool_calls" in of.messages[k - 1], k == 1, bool(of.tools)) if k else ()
        return _cached(of.prompts, key, lambda: self._read_prompt(of, k))

    def _read_prompt(self, of: _Conversation, k: int) -> _Prompt:
        try:
            asking = of.render(of.messages[:k], asks=True)
            without = of.render(of.messages[:k])
        except RefusedError:
            return _Prompt("", "")
        common = _common(asking, without)
        # Without a prompt, a template may close the text: with a token that begins as the prompt does.
        for token in self._tokens.finditer(asking):
            if token.start() < common < token.end():
                common = token.start()
        return _Prompt(asking[common:], asking[len(asking.rstrip()) :])

    def _closings(self, of: _Conversation, k: int) -> tuple[str, ...]:
        """What the template may write behind a turn of the assistant, the longest first.

        Up to the first token of the tokenizer's own, with those that follow it at once, or without.
        """
        key = (of.messages[k - 1]["role"], bool(of.tools)) if k else ()
        return _cached(of.closings, key, lambda: self._read_closings(of, k))

    def _read_closings(self, of: _Conversation, k: int) -> tuple[str, ...]:
        try:
            text = of.render([*of.messages[:k], {"role": of.messages[k]["role"], "content": _SENTINEL}])
        except RefusedError:
            return ("",)
        behind = text.rpartition(_SENTINEL)[2]
        first = self._tokens.search(behind)
        if first is None:
            return ("",)
        end = first.end()
        while (following := self._tokens.match(behind, end)) is not None:
            end = following.end()
        return behind[:end], behind[: first.end()]


class _Conversation:
    """A conversation, its render, and where contents lie in it."""

    def __init__(self, template: ChatTemplate, text: str, messages: Sequence[Message], tools: Tools) -> None:
        self.text, self.messages, self.tools = text, messages, tools
        # Of this conversation alone: what a template writes may depend on the system message.
        self.prompts: dict[tuple[Any, ...], _Prompt] = {}
        self.closings: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._template = template
        self.marked = self._locate(lambda role: True) or self._locate(lambda role: role != "assistant")

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        return self._template.render(messages, self.tools, asks=asks)

    def bounds(self, k: int) -> tuple[int, int] | None:
        """Between which contents of other messages message k stands; None: it is not known."""
        if self.marked is None:
            return None
        others = [n for n, message in enumerate(self.messages) if message["role"] != "system"]
        before = [self.marked.ends[n] for n in others if n < k and n in self.marked.ends]
        after = [self.marked.starts[n] for n in others if n > k and n in self.marked.starts]
        return max(before, default=0), min(after, default=len(self.text))

    def closes_others(self, token: str) -> bool:
        """Whether a token stands behind what someone else than the assistant says."""
        ends = {} if self.marked is None else self.marked.ends
        return any(self.text.startswith(token, at) for n, at in ends.items() if self.messages[n]["role"] == "user")

    def _locate(self, is_marked: Callable[[str], bool]) -> _Marked | None:
        """Render with marks; None where the template treats contents with marks in another way."""
        messages = [
            {**message, "content": _mark(message["content"], n)}
            if "content" in message and is_marked(message["role"])
            else message
            for n, message in enumerate(self.messages)
        ]
        try:
            text = self.render(messages)
        except RefusedError:
            return None
        if MARKS.sub("", text) != self.text:
            return None
        places: dict[int, list[int]] = {}
        for num_before, match in enumerate(MARKS.finditer(text)):
            places.setdefault(ord(match[0]) - _FIRST_MARK, []).append(match.start() - num_before)
        # What a template writes twice says nothing about where a turn ends.
        once = {mark: at[0] for mark, at in places.items() if len(at) == 1}
        starts = {mark // 2: at for mark, at in once.items() if mark % 2 == 0}
        ends = {mark // 2: at for mark, at in once.items() if mark % 2 == 1}
        return _Marked(starts, ends)


def _replacements(messages: Sequence[Message], k: int) -> Iterator[tuple[int, Message, bool]]:
    """What may stand in the place of message k, up to which message of the conversation, and whether it is a call.

    A content in place of all that it says; where the template refuses that, or writes what follows in another way,
    since results follow calls: the same with nothing behind; and last, a call with other arguments.
    """
    kept = {name: value for name, value in messages[k].items() if name not in _BODY_KEYS}
    yield len(messages), {**kept, "content": _SENTINEL}, False
    if k + 1 < len(messages):
        yield k + 1, {**kept, "content": _SENTINEL}, False
    if "tool_calls" in messages[k]:
        *calls, last = messages[k]["tool_calls"]
        other = {**last, "function": {**last["function"], "arguments": {_SENTINEL: 0}}}
        yield len(messages), {**kept, "tool_calls": [*calls, other]}, True


def _mark(content: str, number: int) -> str:
    """Put marks around a content, inside its white space, which templates may trim; without content: none."""
    body = content.strip()
    if not body:
        return content
    before = content[: len(content) - len(content.lstrip())]
    behind = content[len(content.rstrip()) :]
    return f"{before}{chr(_FIRST_MARK + 2 * number)}{body}{chr(_FIRST_MARK + 2 * number + 1)}{behind}"


def _back_over(text: str, place: int, before: str) -> int:
    return place - len(before) if before and text.endswith(before, 0, place) else place


def _behind(text: str, low: int, place: int, space: str) -> int:
    """Go back over the white space before a place, but for `space` at its beginning."""
    start = low + len(text[low:place].rstrip())
    return start + len(space) if text.startswith(space, start, place) else place


def _common(one: str, other: str) -> int:
    """Length of what two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _cached(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], make: Callable[[], T]) -> T:
    if key not in known:
        known[key] = make()
    return known[key]
