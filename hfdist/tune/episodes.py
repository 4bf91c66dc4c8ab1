"""Episodes: the model and environments take turns, for all prompts of a data rank at once, in rounds.

    a round   1. environments (threads of one rank of each model replica) say what the model reads, or end the episode
              2. all ranks of the replica hear it
              3. the model draws a turn of each episode that goes on, in any layout
              4. the one rank gives these turns to the environments

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
"""Key of the calls that close an environment; nobody awaits their results."""
_PATIENCE_SECONDS = 0.1
"""How long a round waits for environments at least; else as long as the model has taken for its last turns."""
_MOST_SAID = 200
"""The most characters of a fault, and of its prompt, that are logged."""


class Asked(NamedTuple):
    """A turn that the model is to take."""

    tokens: list[int]
    """All tokens before the turn, the prompt's included."""
    place: int | None
    """The episode's number on this data rank; None: a filler, with which all ranks draw equally many turns."""
    num_before: int
    """Number of `tokens` that come after the prompt."""
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
    """Makes tokens of what environments say."""
    factory: Factory
    """Makes an environment."""
    schemas: Mapping[str, Schema]
    """JSON schemas of the environment's tools, by name."""
    end_ids: frozenset[int]
    """Tokens that end a turn."""
    fill_id: int
    """Any token: the prompt of a filler."""
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
    """The episode's number on this data rank."""
    goes_on: bool = False
    """Whether the model takes another turn."""
    tokens: Sequence[int] = ()
    """Tokens that the model reads next."""
    prompt: list[int] | None = None
    """The prompt from here on; None: as before."""
    done: bool = False
    """Whether the environment has ended the episode."""
    reward: float = 0.0
    num_calls: int = 0
    """Number of tools that the model's last turn has called."""
    fault: str | None = None
    """Why the environment has failed; None: it has not."""


class _Report(NamedTuple):
    """What a rank tells all others after it has waited for its environments."""

    data_rank: int
    heard: Sequence[_Heard] | None
    """What the environments of its model replica have said, [] if the replica is this rank alone; None: another rank of
    the replica reports it."""
    num_ready: int
    """Number of episodes in which the model takes a turn now."""
    has_players: bool
    """Whether any episode of its model replica has not ended."""


class Episodes:
    """An episode for each prompt of a data rank that is not empty.

    Args:
        setting: what all episodes of the run have in common.
        prompts: tokens of each prompt, the same on all ranks of a model replica; data ranks may have unequal numbers.
        rows: the row with which each episode begins.
    """

    def __init__(self, setting: Setting, prompts: Sequence[list[int]], rows: Sequence[Row]) -> None:
        self._setting, self._topology, self._rows = setting, setting.topology, rows
        self.prompts = [list(prompt) for prompt in prompts]
        """The prompts as the model reads them."""
        self.answers = [Answer() for _ in prompts]
        """The answers so far; an empty prompt keeps an answer without tokens."""
        self._players: dict[int, Player] = {}
        """Environments of the episodes that have not ended, by place; empty but on the first rank of a replica."""
        self._patience_seconds = _PATIENCE_SECONDS

    def play(self, draw: Draw) -> None:
        """Play all episodes to their end. A collective."""
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
        heard: list[_Heard] = []

        def report() -> _Report:
            if not topology.is_first_of_replica:
                return _Report(topology.data_rank, None, 0, False)
            heard.extend(self._collect())
            # A rank that is a whole model replica tells no other: the others have episodes of their own.
            told = heard if topology.world_size > topology.data else []
            return _Report(topology.data_rank, told, sum(one.goes_on for one in heard), bool(self._players))

        with self._setting.waiting():
            reports = [_Report(*fields) for fields in on_all_ranks(report)]
        if not topology.is_first_of_replica:
            heard = _heard_by(topology.data_rank, reports)
        self._apply(heard)
        asked = [self._next_turn(place) for place in sorted(one.place for one in heard if one.goes_on)]
        most_ready = max(one.num_ready for one in reports)
        filler = Asked([self._setting.fill_id], place=None, num_before=0, budget=1)
        asked += [filler] * (most_ready - len(asked))
        return asked, most_ready > 0 or any(one.has_players for one in reports)

    def _next_turn(self, place: int) -> Asked:
        """Describe the turn that the model takes next in an episode."""
        tokens = self.answers[place].tokens
        budget = self._setting.task.max_new_tokens - len(tokens)
        return Asked([*self.prompts[place], *tokens], place, len(tokens), budget)

    # ---- what environments say, on the first rank of a model replica ----

    def _collect(self) -> list[_Heard]:
        """Wait for environments, and give what they have said."""
        return [
            self._read(place, reply)
            for place, reply in self._setting.crew.collect(self._patience_seconds)
            if place in self._players
        ]

    def _read(self, place: int, reply: Reply | BaseException) -> _Heard:
        """Take a reply; the environment of an episode that does not go on is closed."""
        if isinstance(reply, BaseException):
            heard = _failed(place, reply)
        else:
            try:
                heard = self._take_reply(place, reply)
            except (FaultError, RefusedError) as error:
                heard = _failed(place, error)
        if not heard.goes_on:
            player = self._players.pop(place)
            # One that hangs is in another thread still.
            if not isinstance(reply, HangsError):
                self._setting.crew.submit(_CLOSES, player.close)
        return heard

    def _take_reply(self, place: int, reply: Reply) -> _Heard:
        """Note what an environment has said, and find whether its episode goes on, and with which tokens."""
        prompt, tokens = self._tokens_of(place, reply)
        answer, task = self.answers[place], self._setting.task
        has_room = len(answer.tokens) + len(tokens) < task.max_new_tokens
        goes_on = not reply.done and has_room and answer.num_turns < task.max_turns
        # What the model could not read any more is not a part of the episode.
        if goes_on or reply.done:
            answer.turns += reply.said
        return _Heard(
            place,
            goes_on=goes_on,
            tokens=tokens if goes_on else (),
            prompt=prompt if goes_on else None,
            done=reply.done,
            reward=reply.reward,
            num_calls=reply.num_calls,
        )

    def _tokens_of(self, place: int, reply: Reply) -> tuple[list[int], list[int]]:
        """Give the prompt as it is from here on, and the tokens that the model reads next."""
        turns, prompt = self._setting.turns, self.prompts[place]
        if reply.done or not reply.said:
            return prompt, []
        if self.answers[place].num_turns > 0:
            return prompt, turns.after(reply.said, is_chat=turns.is_chat(prompt))
        prompt, tokens = turns.first(prompt, reply.said)
        most = self._setting.task.max_new_tokens
        if len(tokens) >= most:
            found = f"the first observation has {len(tokens):,} tokens"
            raise FaultError(f"{found}, and task.max_new_tokens={most} leaves no turn")
        return prompt, tokens

    # ---- on all ranks ----

    def _apply(self, heard: Sequence[_Heard]) -> None:
        """Bring the answers up to what the environments have said."""
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
        for turn, (tokens, log_probabilities) in zip(asked, drawn, strict=True):
            if turn.place is None:
                continue
            answer, text = self.answers[turn.place], self._setting.text(tokens)
            answer.draw(tokens, log_probabilities)
            answer.num_turns += 1
            answer.turns.append(Turn("assistant", text))
            if not self._topology.is_first_of_replica:
                continue
            player, crew = self._players[turn.place], self._setting.crew
            if tokens[-1] in self._setting.end_ids:
                calls = self._setting.turns.calls(turn.tokens, tokens, text)
                crew.submit(turn.place, partial(player.take, text, calls))
            else:
                # A turn that was cut off is not given to the environment, which would take it for the whole.
                del self._players[turn.place]
                crew.submit(_CLOSES, player.close)


def _heard_by(data_rank: int, reports: Sequence[_Report]) -> list[_Heard]:
    """Give what the first rank of a model replica has heard; the report came as JSON."""
    for report in reports:
        if report.data_rank == data_rank and report.heard is not None:
            return [_Heard(*fields) for fields in report.heard]
    raise AssertionError("the first rank of each model replica reports what it has heard")


def _failed(place: int, error: BaseException) -> _Heard:
    """Describe an episode whose environment has failed; errors of its own code are named with their class."""
    what = first_line(error) if isinstance(error, FaultError | HangsError) else named_line(error)
    return _Heard(place, fault=printable(what, _MOST_SAID))


def warn_of_failed(environment: str | None, prompts: Sequence[str], answers: Sequence[Answer]) -> None:
    """Log how many episodes have failed, with the prompt and the fault of the first.

    Args:
        environment: name of the environment.
        prompts: text of each prompt; an empty one has no episode.
        answers: the answer to each prompt.
    """
    failed = [place for place, answer in enumerate(answers) if answer.fault is not None]
    if failed:
        first = failed[0]
        num_episodes = sum(bool(prompt) for prompt in prompts)
        logger.warning(
            "the environment %s has failed in %d of %d episodes, which do not train; the first: prompt %r: %s",
            environment, len(failed), num_episodes, printable(prompts[first], _MOST_SAID), answers[first].fault,
        )  # fmt: skip
