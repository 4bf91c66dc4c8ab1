"""Episodes: the model and environments take turns, for all prompts of a data rank at once, in rounds.

    round   environments (threads of one rank of each model replica)  ->  what the model reads, or the end
            the model continues all episodes that have something to read, in any layout

A slow environment holds up its own episode alone: a round goes on with those that are ready, and the others join a
later one. Which round an episode is in changes none of its tokens: noise follows from its seed and the place. The
tokens before a turn are computed again in each round, as a prompt is: that costs a forward of them for each turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hfdist.collectives import on_all_ranks
from hfdist.config.task import TaskConfig
from hfdist.data.tokenization.chat_template import RefusedError
from hfdist.environments.crew import Crew, HangsError
from hfdist.environments.environment import Row
from hfdist.environments.player import FaultError, Player, Reply
from hfdist.environments.registry import Factory
from hfdist.environments.tools import Schema
from hfdist.errors import first_line, named_line, printable
from hfdist.rewards.generation import Turn
from hfdist.topology import Topology
from hfdist.trainer.generation.sampling import Drawn
from hfdist.tune.answer import Answer
from hfdist.tune.turn_tokens import TurnTokens

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""The most environments of a rank that are called at a time."""
_CLOSES = -1
"""Key of calls whose results nobody awaits."""
_PATIENCE_SECONDS = 0.1
"""How long a round waits for environments at least; else as long as the model has taken for its last turns."""
_MOST_SAID = 200
"""Characters of a fault and of its prompt that are logged."""


class Asked(NamedTuple):
    """A turn that the model is to take."""

    tokens: list[int]
    """All tokens before it."""
    place: int
    """The episode's number on this data rank; -1: none, so that all ranks have equally many."""
    num_before: int
    """Number of `tokens` after the prompt."""
    budget: int
    """The most tokens of the turn, >= 1."""


Draw = Callable[[Sequence[Asked]], list[Drawn]]
"""Draws turns, each with the token that ended it. A collective; all ranks draw equally many."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all episodes of a run have in common."""

    task: TaskConfig
    tokenizer: PreTrainedTokenizerBase
    turns: TurnTokens
    factory: Factory
    schemas: Mapping[str, Schema]
    """JSON schemas of the environment's tools, by name."""
    end_ids: frozenset[int]
    """Tokens that end a turn."""
    fill_id: int
    """Any token."""
    topology: Topology
    waiting: Callable[[], AbstractContextManager[None]]
    """Makes a context in which a rank may wait for long."""
    crew: Crew[Reply]
    """Calls the environments."""

    def text(self, tokens: Sequence[int]) -> str:
        """Give the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class _Heard(NamedTuple):
    """What all ranks of a model replica must know of what an environment has said."""

    place: int
    goes_on: bool = False
    tokens: Sequence[int] = ()
    """What the model reads next."""
    prompt: list[int] | None = None
    """The prompt from here on; None: as before."""
    done: bool = False
    reward: float = 0.0
    num_calls: int = 0
    fault: str | None = None


class Episodes:
    """An episode for each prompt of a data rank that is not empty.

    Args:
        setting: that of the run.
        prompts: the same on all ranks of a model replica; their number may differ between data ranks.
        rows: what the episodes begin with.
    """

    def __init__(self, setting: Setting, prompts: Sequence[list[int]], rows: Sequence[Row]) -> None:
        self._setting, self._topology, self._rows = setting, setting.topology, rows
        self.prompts = [list(prompt) for prompt in prompts]
        """The prompts as the model reads them."""
        self.answers = [Answer() for _ in prompts]
        self._players: dict[int, Player] = {}
        self._patience_seconds = _PATIENCE_SECONDS

    def play(self, draw: Draw) -> None:
        """Play all to their end. A collective."""
        if self._topology.is_first_of_replica:
            for place, prompt in enumerate(self.prompts):
                if prompt:
                    self._players[place] = Player(self._setting.factory, self._rows[place], self._setting.schemas)
                    self._setting.crew.submit(place, self._players[place].begin)
        goes_on = True
        while goes_on:
            asked, goes_on = self._hear()
            if asked:
                begin = time.monotonic()
                self._speak(asked, draw(asked))
                self._patience_seconds = max(_PATIENCE_SECONDS, time.monotonic() - begin)
        # Ends the threads of the crew.
        self._setting.crew.rest()

    def _hear(self) -> tuple[list[Asked], bool]:
        """Give the turns that are to be drawn, and whether any rank goes on. A collective."""
        topology = self._topology
        shares = topology.world_size > topology.data
        heard: list[_Heard] = []

        def hear() -> list[object]:
            if not topology.is_first_of_replica:
                return [topology.data_rank, None, 0, False]
            heard.extend(self._collect())
            num_ready = sum(one.goes_on for one in heard)
            # Most ranks hold a whole model: what they have heard concerns no other.
            return [topology.data_rank, heard if shares else [], num_ready, bool(self._players)]

        with self._setting.waiting():
            told = on_all_ranks(hear)
        if not topology.is_first_of_replica:
            said = next(said for rank, said, *_ in told if rank == topology.data_rank and said is not None)
            heard = [_Heard(*one) for one in said]
        self._apply(heard)
        asked = [self._ask(place) for place in sorted(one.place for one in heard if one.goes_on)]
        most = max(num_ready for *_, num_ready, _ in told)
        asked += [Asked([self._setting.fill_id], -1, 0, 1)] * (most - len(asked))
        return asked, most > 0 or any(awaits for *_, awaits in told)

    def _ask(self, place: int) -> Asked:
        tokens = self.answers[place].tokens
        budget = self._setting.task.max_new_tokens - len(tokens)
        return Asked([*self.prompts[place], *tokens], place, len(tokens), budget)

    # ---- what environments say, on the first rank of a model replica ----

    def _collect(self) -> list[_Heard]:
        """Wait for environments, and give what they have said, as tokens."""
        return [
            self._read(place, reply)
            for place, reply in self._setting.crew.collect(self._patience_seconds)
            if place in self._players
        ]

    def _read(self, place: int, reply: Reply | BaseException) -> _Heard:
        """Take a reply; the environment of an episode that does not go on is closed."""
        heard = self._describe(place, reply)
        if not heard.goes_on:
            player = self._players.pop(place)
            # One that hangs is in another thread still.
            if not isinstance(reply, HangsError):
                self._setting.crew.submit(_CLOSES, player.close)
        return heard

    def _describe(self, place: int, reply: Reply | BaseException) -> _Heard:
        prompt, tokens = self.prompts[place], list[int]()
        if isinstance(reply, Reply):
            try:
                prompt, tokens = self._tokens_of(place, reply)
            except (FaultError, RefusedError) as error:
                reply = error
        if isinstance(reply, BaseException):
            what = first_line(reply) if isinstance(reply, FaultError | HangsError) else named_line(reply)
            return _Heard(place, fault=printable(what, _MOST_SAID))
        answer, task = self.answers[place], self._setting.task
        has_room = len(answer.tokens) + len(tokens) < task.max_new_tokens
        goes_on = not reply.done and has_room and answer.num_turns < task.max_turns
        if goes_on or reply.done:
            answer.turns += reply.said
        heard = _Heard(place, goes_on=goes_on, done=reply.done, reward=reply.reward, num_calls=reply.num_calls)
        return heard._replace(tokens=tokens, prompt=prompt) if goes_on else heard

    def _tokens_of(self, place: int, reply: Reply) -> tuple[list[int], list[int]]:
        """Give the prompt as it is from here on, and the tokens that the model reads next."""
        turns, prompt = self._setting.turns, self.prompts[place]
        if reply.done or not reply.said:
            return prompt, []
        if self.answers[place].num_turns == 0:
            prompt, tokens = turns.first(prompt, reply.said)
            if len(tokens) >= (most := self._setting.task.max_new_tokens):
                found = f"the first observation has {len(tokens):,} tokens"
                raise FaultError(f"{found}, and task.max_new_tokens={most} leaves no turn")
            return prompt, tokens
        return prompt, turns.after(reply.said, is_chat=turns.is_chat(prompt))

    # ---- on all ranks ----

    def _apply(self, heard: Sequence[_Heard]) -> None:
        for one in heard:
            answer = self.answers[one.place]
            answer.fault = one.fault
            if answer.fault is not None:
                answer.reward = 0.0
                continue
            answer.reward += one.reward
            answer.num_calls += one.num_calls
            answer.has_ended = one.done
            answer.read(list(one.tokens))
            if one.prompt is not None:
                self.prompts[one.place] = one.prompt

    def _speak(self, asked: Sequence[Asked], drawn: Sequence[Drawn]) -> None:
        """Take the turns that were drawn, and give them to their environments."""
        for one, (tokens, log_probabilities) in zip(asked, drawn, strict=True):
            if one.place < 0:
                continue
            answer, text = self.answers[one.place], self._setting.text(tokens)
            answer.draw(tokens, log_probabilities)
            answer.num_turns += 1
            answer.turns.append(Turn("assistant", text))
            if self._topology.is_first_of_replica:
                player, crew = self._players[one.place], self._setting.crew
                if tokens[-1] in self._setting.end_ids:
                    calls = self._setting.turns.calls(one.tokens, tokens, text)
                    crew.submit(one.place, partial(player.take, text, calls))
                else:
                    # A turn that was cut off is not given to the environment, which would take it for the whole.
                    del self._players[one.place]
                    crew.submit(_CLOSES, player.close)


def warn_of_failed(environment: str | None, prompts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Name the first episode that has failed, by its prompt; without a prompt there is none."""
    failed = [(place, answer.fault) for place, answer in enumerate(answers) if answer.fault is not None]
    if failed:
        place, fault = failed[0]
        logger.warning(
            "the environment %s has failed in %d of %d episodes, which do not train; the first: prompt %r: %s",
            environment, len(failed), sum(map(bool, prompts)), printable(prompts[place], _MOST_SAID), fault,
        )  # fmt: skip
