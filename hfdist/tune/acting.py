"""Answers that are episodes with the environment of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from hfdist.config.data import ChatConfig
from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.examples import Example
from hfdist.data.documents.first_examples import are_chats
from hfdist.environments.crew import Crew
from hfdist.environments.environment import Row
from hfdist.environments.player import Reply
from hfdist.environments.registry import load_environment, offered_tools
from hfdist.environments.tools import Schema
from hfdist.kept_generators import keeping_generators
from hfdist.strategies.engine import Batch, Forward
from hfdist.trainer.generation.continuation import continue_rows
from hfdist.trainer.generation.limits import GenerationLimits, find_end_ids
from hfdist.trainer.generation.sampling import Sampling, make_score
from hfdist.trainer.generation.score import BUDGETS, Score, likeliest
from hfdist.trainer.training import Training
from hfdist.tune.answer import Answer
from hfdist.tune.episodes import MOST_AT_ONCE, Asked, Episodes, Setting
from hfdist.tune.turn_tokens import TurnTokens
from hfdist.watch.diagnosis import ACTING


def make_turns(
    config: RunConfig,
    schemas: list[Schema],
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus | None,
    end_ids: Collection[int],
) -> TurnTokens:
    """Make the tokens of turns; ConfigError: the chat template of the data cannot write several of them."""
    chat: ChatConfig = replace(config.data.chat, tools=schemas)
    return TurnTokens(tokenizer, chat, end_ids, are_chats=corpus is not None and bool(are_chats(corpus)))


def check_turns(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, architecture: PreTrainedConfig
) -> None:
    """Check `task.environment` with the chat template of the data, before the model is built.

    ConfigError: see `make_turns`.
    """
    generation = GenerationConfig.from_model_config(architecture)
    if config.model.init is Init.pretrained and config.model.name is not None:
        # A model without such a file ends its turns as its config says.
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(config.model.name, local_files_only=True)
    make_turns(config, offered_tools(config.task), tokenizer, corpus, find_end_ids(generation, tokenizer))


class Acting:
    """Plays episodes for one Trainer."""

    names = ("turns", "tool_calls", "failed_episodes")
    """Names of the figures of answers."""

    # What `begin` sets.
    _setting: Setting
    _limits: GenerationLimits
    _uses_cache: bool

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._task, self._tokenizer = config, config.task, tokenizer
        self._factory = load_environment(config.task)
        self._crew = Crew[Reply](config.task.environment_seconds, MOST_AT_ONCE)

    def begin(self, training: Training, limits: GenerationLimits, *, uses_cache: bool, fill_id: int) -> None:
        """Take the model; ConfigError: the chat template of the data cannot write several turns."""
        self._limits, self._uses_cache = limits, uses_cache
        schemas = offered_tools(self._task)
        corpus = None if training.stream is None else training.stream.corpus
        turns = make_turns(self._config, schemas, self._tokenizer, corpus, limits.end_ids)
        self._setting = Setting(
            task=self._task,
            tokenizer=self._tokenizer,
            turns=turns,
            factory=self._factory,
            schemas={schema["function"]["name"]: schema for schema in schemas},
            end_ids=limits.end_ids,
            fill_id=fill_id,
            topology=training.strategy.topology,
            waiting=partial(training.waiting, ACTING),
            crew=self._crew,
        )

    def answer(
        self,
        examples: Sequence[Example],
        names: Sequence[str],
        seeds: Sequence[int] | None,
        forward: Forward,
        *,
        rows_at_once: int,
    ) -> tuple[list[Example], list[Answer]]:
        """Play an episode for each example that has a prompt. A collective.

        Args:
            examples: the prompts, and what is known of them; the same on all ranks of a model replica.
            names: a name of each prompt, from which the seed of its environment follows.
            seeds: a seed for the tokens of each episode; None: the likeliest tokens are taken.
            forward: runs forwards in the layout.
            rows_at_once: the most rows of a data rank in a forward.

        Returns:
            The examples with their prompts as the model has read them, and the answers.
        """
        text = self._setting.text
        rows = [
            Row(
                prompt=text(example.prompt),
                reference=text(example.reference),
                columns=example.columns,
                seed=int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"),
            )
            for example, name in zip(examples, names, strict=True)
        ]
        episodes = Episodes(self._setting, [example.prompt for example in examples], rows)
        with keeping_generators():
            episodes.play(lambda asked: self._draw(asked, seeds, forward, rows_at_once))
        read = [replace(one, prompt=prompt) for one, prompt in zip(examples, episodes.prompts, strict=True)]
        return read, episodes.answers

    def _draw(
        self, asked: Sequence[Asked], seeds: Sequence[int] | None, forward: Forward, rows_at_once: int
    ) -> list[list[int]]:
        """Draw a turn of each."""
        score: Score = likeliest
        extras: Batch = {}
        if seeds is not None:
            own = [0 if one.place < 0 else seeds[one.place] for one in asked]
            score, extras = make_score(own, Sampling.of(self._task), before=[one.num_before for one in asked])
        extras[BUDGETS] = torch.tensor([one.budget for one in asked])
        return continue_rows(
            [one.tokens for one in asked],
            forward,
            self._limits,
            score=score,
            extras=extras,
            topology=self._setting.topology,
            rows_at_once=rows_at_once,
            uses_cache=self._uses_cache,
        )

    def figures(self, answers: Sequence[Answer]) -> Mapping[str, list[float]]:
        """Give the figures of answers."""
        columns = [[one.num_turns, one.num_calls, one.fault is not None] for one in answers]
        return {name: [float(values[place]) for values in columns] for place, name in enumerate(self.names)}
