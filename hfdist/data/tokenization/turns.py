"""What the assistant says in a conversation, as spans of what a chat template writes.

A turn of the assistant goes from the end of the generation prompt to the end-of-turn token:

    <|im_start|>user  Why?<|im_end|>  <|im_start|>assistant  <think></think>Because.<|im_end|>
                      S   E                                                 S       E
                                      '---- prompt --------''- learned ----------------------'

Templates trim, rewrite and reorder what they are given, so nothing is looked for by its words. Messages are rendered
once more with private characters (S, E) around their contents; where that changes more than these, it is not used. A
message with more than a content (tool calls, reasoning) is replaced by the two characters alone: what that render and
the original have in common before and after is not of the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hfdist.data.sources.images import PLACE
from hfdist.data.tokenization.chat_template import ChatTemplate, Message, RefusedError, Tools

MARKS = re.compile("[\U00100000-\U0010fffd]")
"""Private characters that are used as marks; a conversation may hold none."""
_FIRST_MARK, _MOST_MESSAGES = 0x100000, 0x7FFE
_SENTINEL = chr(_FIRST_MARK + 0xFFFC) + chr(_FIRST_MARK + 0xFFFD)
_PLAIN_KEYS = {"role", "content", "weight", "name"}
_BODY_KEYS = {"tool_calls", "reasoning_content", "reasoning", "thinking"}


class Span(NamedTuple):
    """A range of characters of a render."""

    start: int
    end: int


class _Marked(NamedTuple):
    """Where contents begin and end in a render without marks, by message."""

    starts: Mapping[int, int]
    ends: Mapping[int, int]


class _Prompt(NamedTuple):
    """The generation prompt of a template; may be nothing."""

    text: str
    space: str
    """White space at its end, or, where it is nothing, at the end of what stands before."""


def find_turns(
    template: ChatTemplate,
    tokens: re.Pattern[str],
    text: str,
    messages: Sequence[Message],
    tools: Tools,
    wanted: Sequence[int],
) -> list[Span]:
    """Give the spans of the `wanted` assistant messages; a message that the template leaves out has none.

    `tokens` matches the text of a token that the tokenizer has by itself, such as `<|im_end|>`; `text` is the
    conversation as the template renders it. RefusedError: a turn cannot be told apart from the others.
    """
    if len(messages) > _MOST_MESSAGES:
        raise RefusedError(f"{len(messages)} messages are more than {_MOST_MESSAGES}")
    conversation = _Conversation(template, tokens, text, messages, tools)
    spans = [conversation.by_marks(k) or conversation.by_difference(k) for k in wanted]
    return [span for span in spans if span is not None]


class _Conversation:
    """A conversation, its render, and where contents are in it."""

    def __init__(
        self, template: ChatTemplate, tokens: re.Pattern[str], text: str, messages: Sequence[Message], tools: Tools
    ) -> None:
        self._template, self._tokens = template, tokens
        self._text, self._messages, self._tools = text, messages, tools
        # They are kept for this conversation alone: what a template writes may depend on the system message.
        self._prompts: dict[tuple[object, ...], _Prompt] = {}
        self._known_closings: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._marked = self._locate(lambda role: True) or self._locate(lambda role: role != "assistant")

    def by_marks(self, k: int) -> Span | None:
        """Find a turn that is only a content, after a message that is only a content."""
        message, marked = self._messages[k], self._marked
        if marked is None:
            return None
        if k == 0 or not message.keys() <= _PLAIN_KEYS or not {k - 1, k} <= marked.ends.keys():
            return None
        # Templates move system messages.
        if self._messages[k - 1].keys() & _BODY_KEYS or self._messages[k - 1]["role"] == "system":
            return None
        body, end, low = marked.starts.get(k), marked.ends[k], marked.ends[k - 1]
        if not low <= (end if body is None else body) <= end:
            return None
        prompt, space = self._prompt(k)
        at = self._text.find(prompt, low, end if body is None else body) if prompt else -1
        content = message["content"]
        if at >= 0:
            start = at + len(prompt)
        elif body is not None:
            own = content[: len(content) - len(content.lstrip())]
            start = _back_over(self._text, body, own) if prompt else _after(self._text, low, body, space)
        else:
            return None
        after = content[len(content.rstrip()) :]
        return Span(start, self._close(k, end, after))

    def by_difference(self, k: int) -> Span | None:
        """Find any turn, by what changes in the render when two private characters replace it."""
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
            before = _common(whole, replaced)
            after = _common(whole[before:][::-1], replaced[before:][::-1])
            start, end = self._begin(k, before), len(whole) - after
            if is_call and start == before:
                # The call's name stands before its arguments, and nothing tells where it begins.
                continue
            end = self._close_call(k, end) if is_call else self._close(k, end)
            bounds = self._bounds(k)
            if bounds is not None and bounds[0] <= start <= end <= bounds[1] and self._text.startswith(whole[:end]):
                return Span(start, end)
        raise RefusedError(f"what message {k} says cannot be told apart in what the template writes{reasons[-1]}")

    def _begin(self, k: int, body: int) -> int:
        """Where a turn begins whose first own character is at `body`: after the generation prompt, if it is there."""
        prompt, space = self._prompt(k)
        low, _ = self._bounds(k) or (0, 0)
        if not prompt:
            return _after(self._text, low, body, space)
        at = self._text.rfind(prompt, low, body)
        return at + len(prompt) if at >= 0 else body

    def _close(self, k: int, end: int, after: str = "") -> int:
        """Where a turn ends, with its end-of-turn token: its content ends at `end`, but for white space `after`."""
        closings = self._closings(k)
        for space in dict.fromkeys((after, "")):
            for closing in closings:
                if self._text.startswith(space + closing, end):
                    return end + len(space + closing)
            # Templates that close the last turn in another way than those before close these as they close others'.
            token = self._tokens.match(self._text, end + len(space)) if any(closings) else None
            if token is not None and self._closes_others(token[0]):
                return token.end()
        # The text that two ways of closing have in common may begin inside a token.
        inside = [token for token in self._tokens.finditer(self._text, max(end - 64, 0)) if token.start() < end]
        return max([token.end() for token in inside if token.end() > end], default=end)

    def _close_call(self, k: int, end: int) -> int:
        """Where a turn ends whose last call has its last own character before `end`: with the next closing or token."""
        _, high = self._bounds(k) or (0, 0)
        found = [self._text.find(closing, end, high) + len(closing) for closing in self._closings(k) if closing]
        found = [at for at in found if at > end]
        token = self._tokens.search(self._text, end, high)
        return min(found) if found else token.end() if token is not None else end

    def _prompt(self, k: int) -> _Prompt:
        """The generation prompt after the messages before k."""
        before = self._messages[k - 1] if k else {}
        key = (before.get("role"), "tool_calls" in before, k == 1, bool(self._tools))
        if key not in self._prompts:
            self._prompts[key] = self._read_prompt(k)
        return self._prompts[key]

    def _read_prompt(self, k: int) -> _Prompt:
        try:
            asking = self._render(self._messages[:k], asks=True)
            without = self._render(self._messages[:k])
        except RefusedError:
            return _Prompt("", "")
        common = _common(asking, without)
        # Without a prompt, a template may close the text: with a token that begins as the prompt does.
        for token in self._tokens.finditer(asking):
            if token.start() < common < token.end():
                common = token.start()
        return _Prompt(asking[common:], asking[len(asking.rstrip()) :])

    def _closings(self, k: int) -> tuple[str, ...]:
        """What the template may write after a turn of the assistant, the longest first.

        Up to the first token of the tokenizer's own, with those that follow it at once, or without.
        """
        key = (self._messages[k - 1]["role"] if k else None, bool(self._tools))
        if key not in self._known_closings:
            self._known_closings[key] = self._read_closings(k)
        return self._known_closings[key]

    def _read_closings(self, k: int) -> tuple[str, ...]:
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

    def _bounds(self, k: int) -> tuple[int, int] | None:
        """Give the contents of other messages between which message k stands; None: they are not known."""
        if self._marked is None:
            return None
        others = [n for n, message in enumerate(self._messages) if message["role"] != "system"]
        before = [self._marked.ends[n] for n in others if n < k and n in self._marked.ends]
        after = [self._marked.starts[n] for n in others if n > k and n in self._marked.starts]
        return max(before, default=0), min(after, default=len(self._text))

    def _closes_others(self, token: str) -> bool:
        """Whether a token stands after what someone other than the assistant says."""
        ends = {} if self._marked is None else self._marked.ends
        return any(self._text.startswith(token, at) for n, at in ends.items() if self._messages[n]["role"] == "user")

    def _locate(self, is_marked: Callable[[str], bool]) -> _Marked | None:
        """Render with marks; None where the template treats contents with marks in another way."""
        messages = [
            {**message, "content": _mark(message["content"], n)}
            if "content" in message and is_marked(message["role"])
            else message
            for n, message in enumerate(self._messages)
        ]
        try:
            text = self._render(messages)
        except RefusedError:
            return None
        if MARKS.sub("", text) != self._text:
            return None
        places: dict[int, list[int]] = {}
        for num_before, match in enumerate(MARKS.finditer(text)):
            places.setdefault(ord(match[0]) - _FIRST_MARK, []).append(match.start() - num_before)
        # A mark that a template writes twice says nothing about where a turn ends.
        once = {mark: at[0] for mark, at in places.items() if len(at) == 1}
        starts = {mark // 2: at for mark, at in once.items() if mark % 2 == 0}
        ends = {mark // 2: at for mark, at in once.items() if mark % 2 == 1}
        return _Marked(starts, ends)


def _replacements(messages: Sequence[Message], k: int) -> Iterator[tuple[int, Message, bool]]:
    """What may stand in the place of message k, up to which message of the conversation, and whether it is a call.

    A content in place of all that it says; where the template refuses that, or writes what follows in another way,
    since results follow calls: the same with nothing after it; and last, a call with other arguments.
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
    """Put marks around a content, inside its white space, which templates may trim; without content: none.

    Images at its ends stay outside: templates may put them elsewhere.
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
    return place - len(before) if before and text.endswith(before, 0, place) else place


def _after(text: str, low: int, place: int, space: str) -> int:
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
