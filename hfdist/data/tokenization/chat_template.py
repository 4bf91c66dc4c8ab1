"""A chat template: transformers renders conversations with it in a sandbox, with the same result on every day.

Templates differ in what they take of tool calls and of contents. That is found out once, with small conversations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hfdist.apart import do_apart
from hfdist.config.data import TEMPLATES, ChatConfig
from hfdist.config.paths import expand_user
from hfdist.data.sources.images import PLACE
from hfdist.errors import ConfigError, first_line

Message = dict[str, Any]
"""A message in OpenAI's form."""
Tools = list[dict[str, object]] | None
"""JSON schemas of functions; None: there are none."""
_NO_CONTENTS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})
"""Ways to write that a tool call has no content, in the order in which they are tried: the first is OpenAI's."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DAY = datetime(2024, 7, 26)
"""The day that templates write: today's date would give other tokens tomorrow, after a resume or out of the cache."""
_DIRECTIVES = [*"aAbBcCdDeFgGhHIjklmMnpPrRSTuUVwWxXyYzZf", *(f"-{letter}" for letter in "dejmyHIklMSUVW")]
_FIXED_DAY = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%%', '\x00')"
    + "".join(f" | replace('%{name}', '{_DAY.strftime('%' + name)}')" for name in _DIRECTIVES)
    # The line break goes with the tag (trim_blocks), and the template begins a line, as it does alone.
    + " | replace('\x00', '%') }}{%- endmacro %}\n"
)
"""Jinja that defines `strftime_now` with the fixed day, as replacements of all directives."""
_TRIED = set[str]()
"""Templates, with their arguments, that have rendered within limits in this process, or in one that has forked it."""


class RefusedError(Exception):
    """The error of a conversation that the template does not render; its message is the template's."""


class _TriedCall(NamedTuple):
    """A tool call that a template was tried with."""

    no_content: Message
    """One of `_NO_CONTENTS`."""
    text: str
    """Text that the template wrote."""


def adopt_template(tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
    """Give the tokenizer the template `data.chat.template`, so that the model is saved with the one of its training.

    ConfigError: it cannot be read, or is no template.
    """
    if config.template is not None:
        tokenizer.chat_template = template = read_template(config.template)
        if "{{" not in template and "{%" not in template:
            what, allowed = "this template shows no message", "Jinja, as a tokenizer's own chat template is"
            raise ConfigError(what, where="data.chat.template", found=config.template, allowed=allowed)


class ChatTemplate:
    """Renders the conversations of one run; the tokenizer's special tokens are variables of the template.

    ConfigError: there is no template, it is not Jinja, or it renders without end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._given = None if config.template is None else read_template(config.template)
        if self._given is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, and the data hold conversations",
                where="data.chat.template",
                found="null",
                allowed=f"a file with a chat template in Jinja, or {', '.join(TEMPLATES)}",
                hint="data.chat.template=chatml, or a tokenizer that has one, such as that of an instruct model",
            )
        self.arguments = {**tokenizer.special_tokens_map, **config.template_arguments}
        # Whether the arguments of tool calls must be JSON already, and contents must be in parts.
        self._takes_text = self._takes_parts = False
        # Those of `_NO_CONTENTS` with which the template writes a call, the best first.
        self._no_contents: list[Message] = []
        asked = json.dumps([self._given, tokenizer.chat_template, self.arguments], default=str)
        if asked not in _TRIED:
            # A template may loop without end: it is tried in a process with limits first.
            do_apart(self._probe_calls, where="data.chat.template", found=config.template or
                     f"that of {tokenizer.name_or_path}")  # fmt: skip
            _TRIED.add(asked)
        self._probe_calls()

    def source(self, tools: Tools) -> str:
        """Give the text of the template; some tokenizers have another one for conversations with tools."""
        text = self._given or self._tokenizer.get_chat_template(None, tools)
        return _FIXED_DAY + text if "strftime_now" in text else text

    def marks_turns(self, tools: Tools) -> bool:
        """Whether the template itself marks what the assistant writes, by `{% generation %}`."""
        return _GENERATION.search(self.source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Tools, *, asks: bool = False) -> str:
        """Render messages in OpenAI's form, with JSON schemas of tools; `asks`: with the generation prompt at the end.

        RefusedError: the template does not take them.
        """
        text, _ = self._render(messages, tools, add_generation_prompt=asks)
        return text

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation with a template that marks turns; give the text, and first and last place of each."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: Sequence[Message], tools: Tools, **how: object) -> tuple[str, list[tuple[int, int]]]:
        """Call transformers' renderer with options; give the text, and the spans of turns if they are asked for."""
        source = self.source(tools)
        try:
            messages = [self._fit(message) for message in messages]
            # Any, because the function's annotations are not of what it takes and gives.
            render: Any = render_jinja_template
            texts, spans = render([list(messages)], tools, chat_template=source, **how, **self.arguments)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not Jinja: {first_line(error)}, line "
                f"{error.lineno - source.startswith(_FIXED_DAY)}",
                where="data.chat.template",
            ) from error
        # Besides raise_exception, whatever an expression of a template raises on values that it does not expect.
        except Exception as error:
            raise RefusedError(first_line(error)) from error
        return texts[0], spans[0] if spans else []

    def _fit(self, message: Message) -> Message:
        """Give a message as the template takes it: its content in parts, a call without content, arguments as text."""
        message = self._in_parts(message)
        if "tool_calls" not in message:
            return message
        is_empty = message.get("content") == "" and {"content": ""} in self._no_contents
        if self._no_contents and not message.get("content") and not is_empty:
            rest = {name: value for name, value in message.items() if name != "content"}
            message = {"role": message["role"], **self._no_contents[0], **rest}
        return _with_text_arguments(message) if self._takes_text else message

    def _in_parts(self, message: Message) -> Message:
        """Give a message with its content in parts, if it has images, or if the template takes no other contents."""
        content = message.get("content")
        if not isinstance(content, str) or not (self._takes_parts or PLACE in content):
            return message
        pieces = [piece for piece in re.split(f"({PLACE})", content) if piece]
        parts = [{"type": "image"} if piece == PLACE else {"type": "text", "text": piece} for piece in pieces]
        return {**message, "content": parts or [{"type": "text", "text": ""}]}

    def _probe_parts(self) -> None:
        """Find out whether contents must be in parts: templates for images and text may pass over others."""
        for takes_parts in (False, True):
            self._takes_parts = takes_parts
            with suppress(RefusedError):
                if "probed" in self.render([{"role": "user", "content": "probed"}], None):
                    return
        # The template takes neither: its own error is said for the first conversation.
        self._takes_parts = False

    def _probe_calls(self) -> None:
        """Find out whether arguments of a tool call must be JSON already, and how a call without content is written."""
        self._probe_parts()
        tried = self._try_call()
        # A template that writes arguments as they are would write Python's form.
        if not tried or any("{'probe': 1}" in one.text for one in tried):
            self._takes_text = True
            as_text = self._try_call()
            self._takes_text = any('"probe": 1' in one.text for one in as_text)
            if self._takes_text:
                tried = as_text
        self._no_contents = [one.no_content for one in tried]

    def _try_call(self) -> list[_TriedCall]:
        """Render a tool call with each of `_NO_CONTENTS`; give those with which the template writes the call."""
        call = {"type": "function", "id": "call00000", "function": {"name": "probed", "arguments": {"probe": 1}}}
        tried: list[_TriedCall] = []
        for no_content in _NO_CONTENTS:
            said = {"role": "assistant", **no_content, "tool_calls": [call]}
            with suppress(RefusedError):
                tried.append(_TriedCall(no_content, self.render([{"role": "user", "content": "x"}, said], None)))
        # Some templates write the word None for a content that is None.
        fewest = min((one.text.count("None") for one in tried), default=0)
        return [one for one in tried if "probed" in one.text and one.text.count("None") == fewest]


def read_template(path: str) -> str:
    """Give the template in the file `path`, or the one of that name in TEMPLATES; ConfigError: it cannot be read."""
    if path in TEMPLATES:
        return TEMPLATES[path]
    try:
        return expand_user(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {error}", where="data.chat.template", found=path, allowed="a text file"
        ) from error


def _with_text_arguments(message: Message) -> Message:
    """Give a message whose tool calls have their arguments as JSON texts."""
    calls = [{**call, "function": _as_text(call["function"])} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(function: Mapping[str, object]) -> dict[str, object]:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": written}
