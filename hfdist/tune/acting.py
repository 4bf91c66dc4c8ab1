"""Answers that are episodes with the environment of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

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
from hfdist.environments.registry import load_environment
from hfdist.environments.tools import Schema
from hfdist.kept_generators import keeping_generators
from hfdist.strategies.engine import Forward
from hfdist.trainer.generation.limits import find_end_ids
from hfdist.trainer.generation.sampling import Drawn, Sampler
from hfdist.tune.answer import Answer
from hfdist.tune.episodes import MOST_AT_ONCE, Asked, Episodes, Setting, warn_of_failed
from hfdist.tune.rollout_rows import fill_id
from hfdist.tune.turn_tokens import TurnTokens


def make_turns(
    config: RunConfig,
    schemas: Sequence[Schema],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    *,
    are_chats: bool,
) -> TurnTokens:
    """Make the tokens of turns; ConfigError: the chat template of the data cannot write several of them."""
    chat: ChatConfig = replace(config.data.chat, tools=list(schemas))
    return TurnTokens(tokenizer, chat, end_ids, are_chats=are_chats)


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
    schemas, ends = load_environment(config.task).tools, find_end_ids(generation, tokenizer)
    make_turns(config, schemas, tokenizer, ends, are_chats=bool(are_chats(corpus)))


class Acting:
    """Plays episodes with one model.

    Args:
        config: config of the run.
        tokenizer: tokenizer of the model.
        sampler: draws the turns of the model.
        are_chats: whether the data hold conversations.
        waiting: makes a context in which a rank may wait for long.

    ConfigError: the chat template of the data cannot write several turns.
    """

    names = ("turns", "tool_calls", "failed_episodes")
    """Names of the figures of answers."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        *,
        are_chats: bool,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        factory, schemas = load_environment(config.task)
        ends, self._sampler = sampler.limits.end_ids, sampler
        self._setting = Setting(
            task=config.task,
            tokenizer=tokenizer,
            turns=make_turns(config, schemas, tokenizer, ends, are_chats=are_chats),
            factory=factory,
            schemas={schema["function"]["name"]: schema for schema in schemas},
            end_ids=ends,
            fill_id=fill_id(tokenizer),
            topology=sampler.topology,
            waiting=waiting,
            crew=Crew[Reply](config.task.environment_seconds, MOST_AT_ONCE),
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
        self.warn_of_failed(examples, episodes.answers)
        read = [replace(one, prompt=prompt) for one, prompt in zip(examples, episodes.prompts, strict=True)]
        return read, episodes.answers

    def warn_of_failed(self, examples: Sequence[Example], answers: Sequence[Answer]) -> None:
        """Name the first episode of this data rank that has failed, once."""
        if self._sampler.topology.is_first_of_replica:
            texts = [self._setting.text(example.prompt) for example in examples]
            warn_of_failed(self._setting.task.environment, texts, answers)

    def _draw(
        self, asked: Sequence[Asked], seeds: Sequence[int] | None, forward: Forward, rows_at_once: int
    ) -> list[Drawn]:
        """Draw a turn of each."""
        return self._sampler.draw(
            [one.tokens for one in asked],
            None if seeds is None else [0 if one.place < 0 else seeds[one.place] for one in asked],
            forward,
            rows_at_once=rows_at_once,
            before=[one.num_before for one in asked],
            budgets=[one.budget for one in asked],
        )

    def figures(self, answers: Sequence[Answer]) -> Mapping[str, list[float]]:
        """Give the figures of answers."""
        columns = [[one.num_turns, one.num_calls, one.fault is not None] for one in answers]
        return {name: [float(values[place]) for values in columns] for place, name in enumerate(self.names)}
