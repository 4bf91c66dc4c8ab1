"""A chat template, rendered by transformers in its sandbox, and the same on every day."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hfdist.apart import do_apart
from hfdist.config.data import TEMPLATES, ChatConfig
from hfdist.config.paths import expand_user
from hfdist.data.sources.images import PLACE
from hfdist.errors import ConfigError, first_line

Message = dict[str, Any]
_NO_CONTENTS: tuple[Message, ...] = ({"content": None}, {}, {"content": ""})
"""What a message may have that is a tool call alone, in the order in which they are tried: the first is OpenAI's."""
Tools = list[dict[str, object]] | None

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template that writes today's date would give other tokens tomorrow, after a resume or out of the cache.
_DAY = datetime(2024, 7, 26)
_DIRECTIVES = [*"aAbBcCdDeFgGhHIjklmMnpPrRSTuUVwWxXyYzZf", *(f"-{letter}" for letter in "dejmyHIklMSUVW")]
_FIXED_DAY = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%%', '\x00')"
    + "".join(f" | replace('%{name}', '{_DAY.strftime('%' + name)}')" for name in _DIRECTIVES)
    # The line break goes with the tag (trim_blocks), and the template begins a line, as it does alone.
    + " | replace('\x00', '%') }}{%- endmacro %}\n"
)


_TRIED = set[str]()
"""What has rendered a conversation within limits, in this process or one that has forked it."""


class RefusedError(Exception):
    """The template does not render a conversation; the message is the template's."""


def adopt_template(tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
    """Make `data.chat.template` the tokenizer's own, so that the model is saved with what it was trained with."""
    if config.template is not None:
        tokenizer.chat_template = template = read_template(config.template)
        if "{{" not in template and "{%" not in template:
            what, allowed = "this template shows no message", "Jinja, as a tokenizer's own chat template is"
            raise ConfigError(what, where="data.chat.template", found=config.template, allowed=allowed)


class ChatTemplate:
    """Renders conversations of one run; the tokenizer's special tokens are the template's variables.

    ConfigError: there is no template, or it is not one.
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
        self._takes_text = self._takes_parts = False
        self._contents: list[Message] = []
        asked = json.dumps([self._given, tokenizer.chat_template, self.arguments], default=str)
        if asked not in _TRIED:
            # A template may loop without end.
            do_apart(self._probe_calls, where="data.chat.template", found=config.template or
                     f"that of {tokenizer.name_or_path}")  # fmt: skip
            _TRIED.add(asked)
        self._probe_calls()

    def source(self, tools: Tools) -> str:
        """The template; some tokenizers have another one for tools."""
        text = self._given or self._tokenizer.get_chat_template(None, tools)
        return _FIXED_DAY + text if "strftime_now" in text else text

    def marks_turns(self, tools: Tools) -> bool:
        """Whether the template itself says what the assistant writes."""
        return _GENERATION.search(self.source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Tools, *, asks: bool = False) -> str:
        """Render messages in OpenAI's form, with JSON schemas of tools; `asks`: with the generation prompt at the end.

        RefusedError: the template does not take them.
        """
        return self._render(messages, tools, add_generation_prompt=asks)[0]

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation with a template that marks turns; also give their spans, in characters."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: Sequence[Message], tools: Tools, **how: object) -> tuple[str, list[tuple[int, int]]]:
        source = self.source(tools)
        try:
            messages = [self._fit(message) for message in messages]
            # Any: its annotations are not of what it takes and gives.
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
        """The message as the template takes it: in parts, a call without a content, its arguments as text."""
        message = self._in_parts(message)
        if "tool_calls" not in message:
            return message
        is_empty = message.get("content") == "" and {"content": ""} in self._contents
        if self._contents and not message.get("content") and not is_empty:
            rest = {name: value for name, value in message.items() if name != "content"}
            message = {"role": message["role"], **self._contents[0], **rest}
        return _with_text_arguments(message) if self._takes_text else message

    def _in_parts(self, message: Message) -> Message:
        """The message with its content in parts, where it has images or the template takes no other."""
        content = message.get("content")
        if not isinstance(content, str) or not (self._takes_parts or PLACE in content):
            return message
        pieces = [piece for piece in re.split(f"({PLACE})", content) if piece]
        parts = [{"type": "image"} if piece == PLACE else {"type": "text", "text": piece} for piece in pieces]
        return {**message, "content": parts or [{"type": "text", "text": ""}]}

    def _probe_parts(self) -> None:
        """Find out whether contents must be in parts: templates for images and text may pass over others."""
        for self._takes_parts in (False, True):
            with suppress(RefusedError):
                if "probed" in self.render([{"role": "user", "content": "probed"}], None):
                    return
        self._takes_parts = False

    def _probe_calls(self) -> None:
        """Find out whether the arguments of a tool call must be JSON already, and what a call without a content has."""
        self._probe_parts()
        tried = self._try_call()
        # A template that writes arguments as they are would write Python's form.
        if not tried or any("{'probe': 1}" in text for _, text in tried):
            self._takes_text = True
            as_text = self._try_call()
            self._takes_text = any('"probe": 1' in text for _, text in as_text)
            tried = as_text if self._takes_text else tried
        self._contents = [contents for contents, _ in tried]

    def _try_call(self) -> list[tuple[Message, str]]:
        """Give those of `_NO_CONTENTS` with which the template writes a call, and what it writes."""
        call = {"type": "function", "id": "call00000", "function": {"name": "probed", "arguments": {"probe": 1}}}
        tried = []
        for contents in _NO_CONTENTS:
            said = {"role": "assistant", **contents, "tool_calls": [call]}
            with suppress(RefusedError):
                tried.append((contents, self.render([{"role": "user", "content": "x"}, said], None)))
        # Some write the word None for a content that is none.
        least = min((text.count("None") for _, text in tried), default=0)
        return [(contents, text) for contents, text in tried if "probed" in text and text.count("None") == least]


def read_template(path: str) -> str:
    """Give the template of a file, or one of TEMPLATES; ConfigError: it cannot be read."""
    if path in TEMPLATES:
        return TEMPLATES[path]
    try:
        return expand_user(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {error}", where="data.chat.template", found=path, allowed="a text file"
        ) from error


def _with_text_arguments(message: Message) -> Message:
    calls = [{**call, "function": _as_text(call["function"])} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(function: Mapping[str, object]) -> dict[str, object]:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": written}
