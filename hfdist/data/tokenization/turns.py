"""The turns of the assistant, found as spans of characters in what a chat template writes.

A turn of the assistant goes from the end of the generation prompt to the end-of-turn token:

    <|im_start|>user  Why?<|im_end|>  <|im_start|>assistant  <think></think>Because.<|im_end|>
                      S   E                                                 S       E
                                      '---- prompt --------''- learned ----------------------'

Templates trim, rewrite and reorder what they are given, so a turn cannot be found by searching for its content. There
are two ways.

by marks         The conversation is rendered once more with private characters (S, E) around each content. If nothing
                 else changes in the render, they say where each content is.
by difference    A message with more than a content (tool calls, reasoning) is replaced by two private characters. What
                 that render and the original have in common at their beginning and at their end is not of the message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hfdist.data.sources.images import PLACE
from hfdist.data.tokenization.chat_template import ChatTemplate, Message, RefusedError, Tools

MARKS = re.compile("[\U00100000-\U0010fffd]")
"""Private characters that are used as marks; a conversation may hold none."""
_FIRST_MARK, _MOST_MESSAGES = 0x100000, 0x7FFE
"""Code of the first mark, and the messages for which there are marks: two for each, and two for the sentinel."""
_SENTINEL = chr(_FIRST_MARK + 0xFFFC) + chr(_FIRST_MARK + 0xFFFD)
"""Private characters that replace what a message says."""
_PLAIN_KEYS = {"role", "content", "weight", "name"}
"""Keys of a message that says nothing besides its content."""
_BODY_KEYS = {"tool_calls", "reasoning_content", "reasoning", "thinking"}
"""Keys of what a message says besides its content."""


class Span(NamedTuple):
    """A range of characters in a render; the character at `end` is the first one after it."""

    start: int
    end: int


class _Marked(NamedTuple):
    """Places of the contents in a render, by the number of the message; a content that is not found is missing."""

    starts: Mapping[int, int]
    """First character of each content."""
    ends: Mapping[int, int]
    """Character after the last one of each content."""


class _Prompt(NamedTuple):
    """The generation prompt of a template, which comes before what the assistant says."""

    text: str
    """Text of the prompt; it may be empty."""
    space: str
    """White space at the end of the render with the prompt, also if the prompt is empty."""


class _Replacement(NamedTuple):
    """A message that may stand in the place of another one, to see by the difference where that is."""

    stop: int
    """Number of messages of the conversation that are rendered."""
    message: Message
    is_call: bool
    """Whether the message is a call with other arguments, and not a content."""


def find_turns(
    template: ChatTemplate,
    tokens: re.Pattern[str],
    text: str,
    messages: Sequence[Message],
    tools: Tools,
    wanted: Sequence[int],
) -> list[Span]:
    """Give the spans of the assistant's messages with the numbers `wanted`, without those that the template leaves out.

    `tokens` matches the text of any added token of the tokenizer, such as `<|im_end|>`; `text` is the conversation as
    the template renders it. RefusedError: a turn cannot be told apart from the others.
    """
    if len(messages) > _MOST_MESSAGES:
        raise RefusedError(f"{len(messages)} messages are more than {_MOST_MESSAGES}")
    conversation = _Conversation(template, tokens, text, messages, tools)
    spans = [conversation.by_marks(k) or conversation.by_difference(k) for k in wanted]
    return [span for span in spans if span is not None]


class _Conversation:
    """A conversation with its render, in which the turn of message number k is found."""

    def __init__(
        self, template: ChatTemplate, tokens: re.Pattern[str], text: str, messages: Sequence[Message], tools: Tools
    ) -> None:
        self._template, self._tokens = template, tokens
        self._text, self._messages, self._tools = text, messages, tools
        # Kept for this conversation alone, since what a template writes may depend on the system message.
        self._prompts: dict[tuple[object, ...], _Prompt] = {}
        self._known_closings: dict[tuple[object, ...], tuple[str, ...]] = {}
        # Some templates rewrite only what the assistant says: the contents of others still have places then.
        self._marked = self._locate(marks_assistant=True) or self._locate(marks_assistant=False)

    def by_marks(self, k: int) -> Span | None:
        """Find a turn that is only a content, after a message that is only a content; None: it is not found so."""
        message, marked = self._messages[k], self._marked
        if marked is None or k == 0 or k not in marked.ends or k - 1 not in marked.ends:
            return None
        before = self._messages[k - 1]
        # Templates move system messages.
        if not message.keys() <= _PLAIN_KEYS or before.keys() & _BODY_KEYS or before["role"] == "system":
            return None
        # ... content of k - 1 | low ... prompt ... | body ... content of k ... | end
        low, body, end = marked.ends[k - 1], marked.starts.get(k), marked.ends[k]
        high = end if body is None else body
        if not low <= high <= end:
            return None
        content = message["content"]
        prompt, space = self._prompt(k)
        at = self._text.find(prompt, low, high) if prompt else -1
        if at >= 0:
            start = at + len(prompt)
        elif body is None:
            return None
        elif prompt:
            space_before = content[: len(content) - len(content.lstrip())]
            start = _back_over(self._text, body, space_before)
        else:
            start = _after_space(self._text, low, body, space)
        space_after = content[len(content.rstrip()) :]
        return Span(start, self._close(k, end, space_after))

    def by_difference(self, k: int) -> Span | None:
        """Find any turn, by what changes in the render when two private characters replace what it says.

        None: the template leaves the message out. RefusedError: the turn cannot be told apart.
        """
        reasons = [""]
        for stop, other, is_call in _replacements(self._messages, k):
            try:
                whole = self._text if stop == len(self._messages) else self._render(self._messages[:stop])
                replaced = self._render([*self._messages[:k], other, *self._messages[k + 1 : stop]])
            except RefusedError as error:
                reasons.append(f": {error}")
                continue
            if _SENTINEL not in replaced:
                if replaced == whole and not is_call:
                    return None
                continue
            before = _num_common(whole, replaced)
            after = _num_common(whole[before:][::-1], replaced[before:][::-1])
            start, end = self._begin(k, before), len(whole) - after
            if is_call and start == before:
                # The call's name stands before its arguments, and nothing tells where it begins.
                continue
            end = self._close_call(k, end) if is_call else self._close(k, end)
            bounds = self._bounds(k)
            is_inside = bounds is not None and bounds.start <= start <= end <= bounds.end
            # A part of the conversation may be rendered in another way than the whole.
            if is_inside and self._text.startswith(whole[:end]):
                return Span(start, end)
        raise RefusedError(f"what message {k} says cannot be told apart in what the template writes{reasons[-1]}")

    def _begin(self, k: int, body: int) -> int:
        """Give where turn k begins: after the generation prompt, or at `body`, its first character that differs."""
        prompt, space = self._prompt(k)
        bounds = self._bounds(k)
        low = 0 if bounds is None else bounds.start
        if not prompt:
            return _after_space(self._text, low, body, space)
        at = self._text.rfind(prompt, low, body)
        return at + len(prompt) if at >= 0 else body

    def _close(self, k: int, end: int, space_after: str = "") -> int:
        """Give where turn k ends, with its end-of-turn token.

        Its content ends at `end`; the white space `space_after` of the content may follow, which templates trim.
        """
        closings = self._closings(k)
        for space in dict.fromkeys((space_after, "")):
            for closing in closings:
                if self._text.startswith(space + closing, end):
                    return end + len(space + closing)
            # Templates that close the last turn in another way than those before close these as they close others'.
            token = self._tokens.match(self._text, end + len(space)) if any(closings) else None
            if token is not None and self._closes_others(token[0]):
                return token.end()
        # The text that two ways of closing have in common may begin inside a token, of at most 64 characters.
        ends = [
            token.end()
            for token in self._tokens.finditer(self._text, max(end - 64, 0))
            if token.start() < end < token.end()
        ]
        return max(ends, default=end)

    def _close_call(self, k: int, end: int) -> int:
        """Give where turn k ends: with the first closing, or token, after `end`, where its last call ends."""
        bounds = self._bounds(k)
        if bounds is None:
            return end
        ends: list[int] = []
        for closing in self._closings(k):
            at = self._text.find(closing, end, bounds.end) if closing else -1
            if at >= 0:
                ends.append(at + len(closing))
        if ends:
            return min(ends)
        token = self._tokens.search(self._text, end, bounds.end)
        return end if token is None else token.end()

    def _prompt(self, k: int) -> _Prompt:
        """Give the generation prompt that stands before message k."""
        before = self._messages[k - 1] if k else {}
        # What decides a prompt, as templates go.
        key = (before.get("role"), "tool_calls" in before, k == 1, bool(self._tools))
        if key not in self._prompts:
            self._prompts[key] = self._read_prompt(k)
        return self._prompts[key]

    def _read_prompt(self, k: int) -> _Prompt:
        """Compare the render of the messages before k that asks for an answer with the one that does not."""
        try:
            asking = self._render(self._messages[:k], asks=True)
            without = self._render(self._messages[:k])
        except RefusedError:
            return _Prompt("", "")
        common = _num_common(asking, without)
        # Without a prompt, a template may close the text: with a token that begins as the prompt does.
        for token in self._tokens.finditer(asking):
            if token.start() < common < token.end():
                common = token.start()
        return _Prompt(asking[common:], asking[len(asking.rstrip()) :])

    def _closings(self, k: int) -> tuple[str, ...]:
        """Give the texts by which the template may close turn k, the longest first.

        A closing goes up to the first added token; a longer one also has the added tokens that follow it at once.
        """
        key = (self._messages[k - 1]["role"] if k else None, bool(self._tools))
        if key not in self._known_closings:
            self._known_closings[key] = self._read_closings(k)
        return self._known_closings[key]

    def _read_closings(self, k: int) -> tuple[str, ...]:
        """Read the closings after a content that is only private characters."""
        try:
            text = self._render([*self._messages[:k], {"role": self._messages[k]["role"], "content": _SENTINEL}])
        except RefusedError:
            return ("",)
        after = text.rpartition(_SENTINEL)[2]
        first = self._tokens.search(after)
        if first is None:
            return ("",)
        end = first.end()
        while (following := self._tokens.match(after, end)) is not None:
            end = following.end()
        return after[:end], after[: first.end()]

    def _render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        return self._template.render(messages, self._tools, asks=asks)

    def _bounds(self, k: int) -> Span | None:
        """Give the span between the contents of other messages in which message k stands; None: it is not known."""
        if self._marked is None:
            return None
        others = [n for n, message in enumerate(self._messages) if message["role"] != "system"]
        before = [self._marked.ends[n] for n in others if n < k and n in self._marked.ends]
        after = [self._marked.starts[n] for n in others if n > k and n in self._marked.starts]
        return Span(max(before, default=0), min(after, default=len(self._text)))

    def _closes_others(self, token: str) -> bool:
        """Whether a token stands after what someone other than the assistant says."""
        if self._marked is None:
            return False
        user_ends = [at for n, at in self._marked.ends.items() if self._messages[n]["role"] == "user"]
        return any(self._text.startswith(token, at) for at in user_ends)

    def _locate(self, *, marks_assistant: bool) -> _Marked | None:
        """Render with marks around the contents; None: the template treats contents with marks in another way."""
        messages: list[Message] = []
        for n, message in enumerate(self._messages):
            if "content" in message and (marks_assistant or message["role"] != "assistant"):
                message = {**message, "content": _mark(message["content"], n)}
            messages.append(message)
        try:
            text = self._render(messages)
        except RefusedError:
            return None
        if MARKS.sub("", text) != self._text:
            return None
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        found = list(MARKS.finditer(text))
        counts = Counter(match[0] for match in found)
        for num_before, match in enumerate(found):
            # A mark that a template writes twice says nothing about where a turn ends.
            if counts[match[0]] == 1:
                # Message n has the marks 2n and 2n + 1.
                n, is_end = divmod(ord(match[0]) - _FIRST_MARK, 2)
                places = ends if is_end else starts
                places[n] = match.start() - num_before
        return _Marked(starts, ends)


def _replacements(messages: Sequence[Message], k: int) -> Iterator[_Replacement]:
    """Give messages that may stand in the place of message k, in the order in which they are tried.

    First comes a content in place of all that the message says. A template may refuse that, or write what follows in
    another way, since results follow calls: so the same comes with nothing after it. Last is a call with other
    arguments.
    """
    kept = {name: value for name, value in messages[k].items() if name not in _BODY_KEYS}
    content_only = {**kept, "content": _SENTINEL}
    yield _Replacement(len(messages), content_only, is_call=False)
    if k + 1 < len(messages):
        yield _Replacement(k + 1, content_only, is_call=False)
    if "tool_calls" in messages[k]:
        *calls, last = messages[k]["tool_calls"]
        other = {**last, "function": {**last["function"], "arguments": {_SENTINEL: 0}}}
        yield _Replacement(len(messages), {**kept, "tool_calls": [*calls, other]}, is_call=True)


def _mark(content: str, number: int) -> str:
    """Put the marks of message `number` around a content, unless it is empty.

    White space and images at its ends stay outside: templates may trim the one, and put the other elsewhere.
    """
    start, stop = 0, len(content)
    while start < stop and _is_outside(content[start]):
        start += 1
    while start < stop and _is_outside(content[stop - 1]):
        stop -= 1
    before, body, after = content[:start], content[start:stop], content[stop:]
    if not body:
        return content
    return f"{before}{chr(_FIRST_MARK + 2 * number)}{body}{chr(_FIRST_MARK + 2 * number + 1)}{after}"


def _is_outside(letter: str) -> bool:
    return letter == PLACE or letter.isspace()


def _back_over(text: str, place: int, before: str) -> int:
    """Give the place where `before` begins, if it stands right before `place`; else `place`."""
    return place - len(before) if before and text.endswith(before, 0, place) else place


def _after_space(text: str, low: int, place: int, space: str) -> int:
    """Give the place after `space`, if that begins the white space before `place`; else `place`."""
    start = low + len(text[low:place].rstrip())
    return start + len(space) if text.startswith(space, start, place) else place


def _num_common(one: str, other: str) -> int:
    """Count the characters with which both texts begin, by halving: comparing slices is faster than characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
