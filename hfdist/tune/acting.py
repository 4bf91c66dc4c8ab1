"""Episodes of one model: it answers each prompt by taking turns with the environment of the run."""

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
    """Make what turns the words of an environment into tokens, with its tools in the chat template.

    Args:
        config: config of the run.
        schemas: JSON schemas of the environment's tools.
        tokenizer: tokenizer of the model.
        end_ids: tokens that end a turn.
        are_chats: whether the data hold conversations.

    Raises:
        ConfigError: the chat template of the data cannot write several turns.
    """
    chat: ChatConfig = replace(config.data.chat, tools=list(schemas))
    return TurnTokens(tokenizer, chat, end_ids, are_chats=are_chats)


def check_turns(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, architecture: PreTrainedConfig
) -> None:
    """Check `task.environment` with the chat template of the data, before the model is built.

    Raises:
        ConfigError: the template cannot write several turns.
    """
    generation = GenerationConfig.from_model_config(architecture)
    if config.model.init is Init.pretrained and config.model.name is not None:
        # A model without such a file ends its turns as its config says.
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(config.model.name, local_files_only=True)
    schemas = load_environment(config.task).tools
    end_ids = find_end_ids(generation, tokenizer)
    make_turns(config, schemas, tokenizer, end_ids, are_chats=bool(are_chats(corpus)))


class Acting:
    """Plays episodes with one model.

    Args:
        config: config of the run.
        tokenizer: tokenizer of the model.
        sampler: draws the turns of the model.
        are_chats: whether the data hold conversations.
        waiting: makes a context in which a rank may wait for long.

    Raises:
        ConfigError: the chat template of the data cannot write several turns.
    """

    names = ("turns", "tool_calls", "failed_episodes")
    """Names of the figures that `figures` gives."""

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
        end_ids = sampler.limits.end_ids
        self._sampler = sampler
        self._setting = Setting(
            task=config.task,
            tokenizer=tokenizer,
            turns=make_turns(config, schemas, tokenizer, end_ids, are_chats=are_chats),
            factory=factory,
            schemas={schema["function"]["name"]: schema for schema in schemas},
            end_ids=end_ids,
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
        rows = [self._row(example, name) for example, name in zip(examples, names, strict=True)]
        episodes = Episodes(self._setting, [example.prompt for example in examples], rows)
        # The environment is a user's code: the random numbers that it draws are not those of the training.
        with keeping_generators():
            episodes.play(lambda asked: self._draw(asked, seeds, forward, rows_at_once))
        self.warn_of_failed(examples, episodes.answers)
        read = [replace(example, prompt=prompt) for example, prompt in zip(examples, episodes.prompts, strict=True)]
        return read, episodes.answers

    def _row(self, example: Example, name: str) -> Row:
        """Make what an environment begins an episode with; its seed follows from the name of the prompt."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return Row(
            prompt=self._setting.text(example.prompt),
            reference=self._setting.text(example.reference),
            columns=example.columns,
            seed=int.from_bytes(digest, "little"),
        )

    def warn_of_failed(self, examples: Sequence[Example], answers: Sequence[Answer]) -> None:
        """Log the first episode of this data rank that has failed, on one rank of the model replica."""
        if self._sampler.topology.is_first_of_replica:
            texts = [self._setting.text(example.prompt) for example in examples]
            warn_of_failed(self._setting.task.environment, texts, answers)

    def _draw(
        self, asked: Sequence[Asked], seeds: Sequence[int] | None, forward: Forward, rows_at_once: int
    ) -> list[Drawn]:
        """Draw the turns that the model is asked for."""
        turn_seeds = None
        if seeds is not None:
            # A filler belongs to no episode: any seed will do.
            turn_seeds = [0 if turn.place is None else seeds[turn.place] for turn in asked]
        return self._sampler.draw(
            [turn.tokens for turn in asked],
            turn_seeds,
            forward,
            rows_at_once=rows_at_once,
            before=[turn.num_before for turn in asked],
            budgets=[turn.budget for turn in asked],
        )

    def figures(self, answers: Sequence[Answer]) -> Mapping[str, list[float]]:
        """Give the turns, the calls of tools, and 1.0 for a failure, of each answer, by the name of the figure."""
        turns = [float(answer.num_turns) for answer in answers]
        tool_calls = [float(answer.num_calls) for answer in answers]
        failed = [float(answer.fault is not None) for answer in answers]
        return dict(zip(self.names, (turns, tool_calls, failed), strict=True))
