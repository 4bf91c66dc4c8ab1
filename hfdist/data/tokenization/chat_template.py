"""A chat template, rendered by transformers in its sandbox, the same on every day."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hfdist.config.data import ChatConfig
from hfdist.data.sources.base import first_line
from hfdist.errors import ConfigError

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template that writes today's date would give other tokens tomorrow, after a resume or out of the cache.
_DAY = datetime(2024, 7, 26)
_DIRECTIVES = "aAbBdjmUwWxXyYHIMSpc"
_FIXED_DAY = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('%{letter}', '{_DAY.strftime('%' + letter)}')" for letter in _DIRECTIVES)
    + " }}{%- endmacro -%}"
)


class RefusedError(Exception):
    """The template does not render a conversation; the message is the template's."""


def adopt_template(tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
    """Make `data.chat.template` the tokenizer's own, so that the model is saved with what it was trained with."""
    if config.template is not None:
        tokenizer.chat_template = _read(config.template)


class ChatTemplate:
    """Renders conversations of one run.

    Args:
        tokenizer: its special tokens are the template's variables.
        config: `data.chat`.

    Raises:
        ConfigError: there is no template, or it is not one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._given = None if config.template is None else _read(config.template)
        if self._given is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, and the data hold conversations",
                where="data.chat.template",
                found="null",
                allowed="a file with a chat template in Jinja",
                hint="data.chat.template=chat.jinja, or a tokenizer that has one, such as that of an instruct model",
            )
        self.arguments = {**tokenizer.special_tokens_map, **config.template_arguments}
        self._takes_text = False
        self._takes_text = self._wants_arguments_as_text()

    def source(self, tools: Tools) -> str:
        """The template; some tokenizers have another one for tools."""
        text = self._given or self._tokenizer.get_chat_template(None, tools)
        return _FIXED_DAY + text if "strftime_now" in text else text

    def marks_turns(self, tools: Tools) -> bool:
        """Whether the template itself says what the assistant writes."""
        return _GENERATION.search(self.source(tools)) is not None

    def render(self, messages: Sequence[Message], tools: Tools, *, asks: bool = False) -> str:
        """Render a conversation.

        Args:
            messages: in OpenAI's form.
            tools: JSON schemas.
            asks: with the generation prompt behind.

        Raises:
            RefusedError: the template does not take it.
        """
        return self._render(messages, tools, add_generation_prompt=asks)[0]

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation with a template that marks turns; also give their spans, in characters."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: Sequence[Message], tools: Tools, **how: Any) -> tuple[str, list[tuple[int, int]]]:
        source = self.source(tools)
        try:
            if self._takes_text:
                messages = [_with_text_arguments(message) for message in messages]
            # Any: its annotations are not of what it takes and gives.
            render: Any = render_jinja_template
            texts, spans = render([list(messages)], tools, chat_template=source, **how, **self.arguments)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not Jinja: {first_line(error)}, line {error.lineno}", where="data.chat.template"
            ) from error
        # Besides raise_exception, whatever an expression of a template raises on values that it does not expect.
        except Exception as error:
            raise RefusedError(first_line(error)) from error
        return texts[0], spans[0] if spans else []

    def _wants_arguments_as_text(self) -> bool:
        """Whether the template writes the arguments of a tool call as they are, so that they must be JSON already."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"probe": 1}}}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return "{'probe': 1}" in self.render(messages, None)
        except RefusedError:
            pass
        self._takes_text = True
        try:
            return '"probe": 1' in self.render(messages, None)
        except RefusedError:
            # A template without tool calls.
            return False
        finally:
            self._takes_text = False


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {error}", where="data.chat.template", found=path, allowed="a text file"
        ) from error


def _with_text_arguments(message: Message) -> Message:
    calls = [{**call, "function": _as_text(call["function"])} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": written}
