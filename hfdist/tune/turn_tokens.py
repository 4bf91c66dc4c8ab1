r"""The tokens that stand between a turn of the model and its next one: what it reads of an environment.

What the model has drawn is never made into tokens again. If the prompt is a chat, the chat template is rendered twice
with a turn of ours in place of the model's:

    <user> x <end> <assistant> x <end>                                    a
    <user> x <end> <assistant> x <end> \n <tool> 42 <end> \n <assistant>   b

The tokens of b after the last end token of a are those that stand in an episode after the end token that the model has
drawn. If the prompt is plain text, they are `\n` + observation + `\n`, and the result of a tool stands between
<tool_response> and </tool_response>.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hfdist.config.data import ChatConfig
from hfdist.data.marks import ids_of
from hfdist.data.tokenization.chat_encoder import ChatEncoder
from hfdist.data.tokenization.chat_template import Message, RefusedError
from hfdist.data.tokenization.text_encoder import Encoder
from hfdist.environments.tools import Call, as_call, find_calls
from hfdist.errors import ConfigError
from hfdist.rewards.generation import Turn

_PROBED = "probed"
"""Words that a template must write if it can write a turn of the environment."""
_ASKED: Message = {"role": "user", "content": "x"}
"""First message of each conversation that is rendered here, in place of the prompt."""


class TurnTokens:
    """Makes tokens of what the model reads between its turns.

    Args:
        tokenizer: tokenizer of the model, with the chat template of the data.
        chat: how conversations are rendered; its tools are those of the environment.
        end_ids: tokens that end a turn.
        are_chats: whether the data hold conversations; prompts of other sources may be plain.

    Raises:
        ConfigError: there are conversations, and the template cannot write several turns.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, end_ids: Collection[int], *, are_chats: bool
    ) -> None:
        self._tokenizer, self._chat, self._ends, self._are_chats = tokenizer, chat, end_ids, are_chats
        self._plain = Encoder(tokenizer)
        if are_chats:
            self._check_chats()

    @cached_property
    def _chats(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer, self._chat, self._plain)

    @cached_property
    def _opening(self) -> list[int]:
        """The tokens that let the model begin, at the end of each chat prompt; []: the template writes none."""
        asked, whole = self._ids([_ASKED], asks=False), self._ids([_ASKED], asks=True)
        return whole[len(asked) :] if whole[: len(asked)] == asked else []

    def is_chat(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is a conversation: it ends with the tokens that let the model begin."""
        return self._are_chats and list(prompt[len(prompt) - len(self._opening) :]) == self._opening

    def _check_chats(self) -> None:
        """Raise a ConfigError if the chat template cannot write what an environment says."""
        tool_names = [tool["function"]["name"] for tool in self._chat.tools]
        probe = Turn("tool", _PROBED, tool_names[0]) if tool_names else Turn("user", _PROBED)
        try:
            if _PROBED not in self._tokenizer.decode(self.after([probe], is_chat=True)):
                raise RefusedError(f"it leaves out messages of the role {probe.role}")
        except RefusedError as error:
            what = f"the chat template cannot write episodes of several turns: {error}"
            found = self._chat.template or f"that of {self._tokenizer.name_or_path}"
            allowed = "a template that writes a turn in the same way, with an end token, whatever follows it"
            raise ConfigError(what, where="data.chat.template", found=found, allowed=allowed) from error

    def first(self, prompt: list[int], said: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """Give the prompt, and the tokens that the model reads after it, before its first turn.

        In a chat these are another turn of the user, and the tokens that let the model begin. So the prompt loses such
        tokens at its end.

        Args:
            prompt: tokens of the prompt.
            said: what the environment says first.

        Raises:
            RefusedError: the template does not take two turns of the user.
        """
        if not self.is_chat(prompt):
            return prompt, self.after(said, is_chat=False)
        asked = self._ids([_ASKED], asks=False)
        whole = self._ids([_ASKED, *_as_messages(said)], asks=True)
        if whole[: len(asked)] != asked:
            raise RefusedError("it writes a turn in another way once others follow")
        return prompt[: len(prompt) - len(self._opening)], whole[len(asked) :]

    def after(self, said: Sequence[Turn], *, is_chat: bool) -> list[int]:
        """Give the tokens that the model reads after one of its turns.

        Args:
            said: what the environment says.
            is_chat: whether the prompt is a conversation.

        Raises:
            RefusedError: the template cannot write that.
        """
        if not is_chat:
            return self._plain.inside("".join(map(_as_text, said)))
        before = self._turn_before(said)
        whole = self._ids([_ASKED, before.message, *_as_messages(said)], asks=True)
        if whole[: len(before.ids)] != before.ids:
            raise RefusedError("it writes a turn in another way once others follow")
        return whole[len(before.ids) :]

    def _turn_before(self, said: Sequence[Turn]) -> _ModelTurn:
        """Make a turn of the model that `said` can follow: results of tools want calls of them."""
        calls = [_as_call(turn, number) for number, turn in enumerate(said) if turn.role == "tool"]
        if calls:
            # A template that knows no calls leaves them to the text.
            with suppress(RefusedError):
                return self._render_ended({"role": "assistant", "content": "", "tool_calls": calls})
        return self._render_ended({"role": "assistant", "content": "x"})

    def _render_ended(self, message: Message) -> _ModelTurn:
        """Render a turn of the model; RefusedError: no end token stands at its end."""
        ids = self._ids([_ASKED, message], asks=False)
        ends = [place for place, token in enumerate(ids) if token in self._ends]
        # Only blanks may follow the end token, such as a line end.
        if not ends or str(self._tokenizer.decode(ids[ends[-1] + 1 :])).strip():
            raise RefusedError("it puts no end token after a turn at which the model stops")
        return _ModelTurn(message, ids[: ends[-1] + 1])

    def _ids(self, messages: list[Message], *, asks: bool) -> list[int]:
        """Render messages to tokens; `asks`: with those at the end that let the model begin."""
        tools: Any = self._chat.tools or None
        chat = self._chats.render(messages, tools, len(messages) if asks else 0)
        # As the template writes it: to an example of the data, the encoder would add an end where there is none.
        bare = chat._replace(asks=False, is_answered=False)
        [encoded] = self._chats.encode([bare])
        return [int(token) for token in ids_of(encoded)]

    def calls(self, prompt: Sequence[int], turn: Sequence[int], text: str) -> list[Call]:
        """Find the calls of tools in a turn of the model.

        Args:
            prompt: all tokens before the turn.
            turn: tokens of the turn.
            text: text of the turn.
        """
        if not self._chat.tools:
            return []
        if getattr(self._tokenizer, "response_template", None) is None:
            return find_calls(text)
        tools: Any = self._chat.tools
        try:
            said = self._tokenizer.parse_response(list(turn), prefix=list(prompt), tools=tools)
        except Exception:  # it raises many kinds on what no model should write: that is no call
            return []
        return [as_call(call) for call in said.get("tool_calls") or []]


class _ModelTurn(NamedTuple):
    """A turn that stands for one of the model's."""

    message: Message
    ids: list[int]
    """All tokens up to its end token."""


def _as_text(turn: Turn) -> str:
    """Write a turn of the environment after a plain prompt."""
    if turn.role == "tool":
        return f"\n<tool_response>{turn.text}</tool_response>\n"
    return f"\n{turn.text}\n"


def _as_messages(said: Sequence[Turn]) -> list[Message]:
    """Write turns of the environment as messages; the result of a tool names the call that `_as_call` makes."""
    messages: list[Message] = []
    for number, turn in enumerate(said):
        message: Message = {"role": turn.role, "content": turn.text}
        if turn.role == "tool":
            message |= {"name": turn.name, "tool_call_id": _call_id(number)}
        messages.append(message)
    return messages


def _as_call(turn: Turn, number: int) -> Message:
    """Make the call that the result of a tool answers."""
    return {"type": "function", "id": _call_id(number), "function": {"name": turn.name, "arguments": {}}}


def _call_id(number: int) -> str:
    # Some templates want nine letters or digits.
    return f"call{number:05}"
