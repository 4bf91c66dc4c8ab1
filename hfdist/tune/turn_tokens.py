r"""The tokens that stand between a turn of the model and its next one: what it reads of an environment.

What the model has drawn is never made into tokens again. Of a chat, the template is rendered with a turn of ours:

    <user> x <end> <assistant> x <end>                                    a
    <user> x <end> <assistant> x <end> \n <tool> 42 <end> \n <assistant>   b

What b has after the last end token of a stands in an episode after the end token that the model has drawn. Of a plain
text it is `\n` + observation + `\n`, and a result of a tool is between <tool_response> and </tool_response>.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

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
_ASKED: Message = {"role": "user", "content": "x"}


class TurnTokens:
    """Tokens of turns for one tokenizer.

    Args:
        tokenizer: its template is that of the data.
        chat: how conversations are rendered; its tools are those of the environment.
        end_ids: tokens that end a turn.
        are_chats: whether the data hold conversations; prompts of other sources may be plain.

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
        """What stands at the end of each prompt that is a chat; empty: the template lets the model begin at once."""
        asked, whole = self._ids([_ASKED], asks=False), self._ids([_ASKED], asks=True)
        return whole[len(asked) :] if whole[: len(asked)] == asked else []

    def is_chat(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is a conversation, by its end."""
        return self._are_chats and list(prompt[len(prompt) - len(self._opening) :]) == self._opening

    def _check_chats(self) -> None:
        names = [tool["function"]["name"] for tool in self._chat.tools]
        probe = Turn("tool", _PROBED, names[0]) if names else Turn("user", _PROBED)
        try:
            if _PROBED not in self._tokenizer.decode(self.after([probe], is_chat=True)):
                raise RefusedError(f"it leaves out messages of the role {probe.role}")
        except RefusedError as error:
            what = f"the chat template cannot write episodes of several turns: {error}"
            found = self._chat.template or f"that of {self._tokenizer.name_or_path}"
            allowed = "a template that writes a turn in the same way, with an end token, whatever follows it"
            raise ConfigError(what, where="data.chat.template", found=found, allowed=allowed) from error

    def first(self, prompt: list[int], said: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """Give what the prompt is, and the tokens that the model reads after it, before its first turn.

        Of a chat that is another user's turn: the words that let the model answer come after it, not before.

        RefusedError: the template does not take two of them.
        """
        if not self.is_chat(prompt):
            return prompt, self.after(said, is_chat=False)
        asked, whole = (self._ids([_ASKED, *more], asks=bool(more)) for more in ([], _as_messages(said)))
        if whole[: len(asked)] != asked:
            raise RefusedError("it writes a turn in another way once others follow")
        return prompt[: len(prompt) - len(self._opening)], whole[len(asked) :]

    def after(self, said: Sequence[Turn], *, is_chat: bool) -> list[int]:
        """Give the tokens of what the model reads after a turn; RefusedError: the template cannot write that."""
        if not is_chat:
            return self._plain.inside("".join(map(_plainly, said)))
        before, ended = self._before(said)
        whole = self._ids([_ASKED, before, *_as_messages(said)], asks=True)
        if whole[: len(ended)] != ended:
            raise RefusedError("it writes a turn in another way once others follow")
        return whole[len(ended) :]

    def _before(self, said: Sequence[Turn]) -> tuple[Message, list[int]]:
        """Give a turn that what is said can follow, and all tokens up to its end."""
        calls = [_as_call(turn, number) for number, turn in enumerate(said) if turn.role == "tool"]
        if calls:
            # A template that knows no calls leaves them to the text.
            with suppress(RefusedError):
                return self._ended({"role": "assistant", "content": "", "tool_calls": calls})
        return self._ended({"role": "assistant", "content": "x"})

    def _ended(self, message: Message) -> tuple[Message, list[int]]:
        ids = self._ids([_ASKED, message], asks=False)
        last = max((place for place, token in enumerate(ids) if token in self._ends), default=-1)
        if last < 0 or str(self._tokenizer.decode(ids[last + 1 :])).strip():
            raise RefusedError("it puts no end token after a turn at which the model stops")
        return message, ids[: last + 1]

    def _ids(self, messages: list[Message], *, asks: bool) -> list[int]:
        tools: Any = self._chat.tools or None
        chat = self._chats.render(messages, tools, len(messages) if asks else 0)
        # As the template writes it: of an example the encoder would add an end where there is none.
        bare = chat._replace(asks=False, is_answered=False)
        return [int(token) for token in ids_of(self._chats.encode([bare])[0])]

    def calls(self, prompt: Sequence[int], turn: Sequence[int], text: str) -> list[Call]:
        """Find the calls of tools in a turn of the model, after the tokens before it."""
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


def _plainly(turn: Turn) -> str:
    return f"\n<tool_response>{turn.text}</tool_response>\n" if turn.role == "tool" else f"\n{turn.text}\n"


def _as_messages(said: Sequence[Turn]) -> list[Message]:
    return [
        {"role": turn.role, "content": turn.text}
        | ({"name": turn.name, "tool_call_id": _id(number)} if turn.role == "tool" else {})
        for number, turn in enumerate(said)
    ]


def _as_call(turn: Turn, number: int) -> Message:
    return {"type": "function", "id": _id(number), "function": {"name": turn.name, "arguments": {}}}


def _id(number: int) -> str:
    # Some templates want nine letters or digits.
    return f"call{number:05}"
