"""Answers to the prompts of a step, their rewards, and the batches that they become.

Which answer a prompt gets follows from the weights, the run's seed and the prompt's number in the run's data alone: no
layout changes it. An answer is a row: the prompt, the answer, and a filling, which counts as another document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.config.batch import IGNORED
from hfdist.config.run import RunConfig
from hfdist.data.documents.examples import Example
from hfdist.data.stream.token_stream import DOCUMENTS
from hfdist.rewards import Generation, Reward
from hfdist.rewards.registry import Steps
from hfdist.strategies.engine import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_generate
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits, find_limits
from hfdist.trainer.generation.sampling import Sampling, sample_completions
from hfdist.trainer.training import Training
from hfdist.tune.rollout_lines import RolloutLines
from hfdist.tune.rollout_rows import OLD_LOG_PROBABILITIES, REWARDS, TRAINS, at_targets, make_rows, read_examples
from hfdist.tune.step_rewards import add_up, differ, of_answers, of_steps, total

if TYPE_CHECKING:
    from hfdist.tune.generators.generators import Generators


class Rollouts:
    """Answers, rewards and batches of one Trainer.

    Args:
        config: config of the run; `task.*` says how answers are sampled, and by whom.
        rewards: functions that score answers.
        tokenizer: tokenizer of the model.
        examples: held-out prompts with their references.
        lines: writes some answers, on rank 0.
    """

    # What `begin` sets.
    _training: Training
    _topology: Topology
    _limits: GenerationLimits
    _uses_cache: bool
    """Whether rows are continued with a cache: see `can_generate`."""

    def __init__(
        self,
        config: RunConfig,
        rewards: Sequence[Reward],
        tokenizer: PreTrainedTokenizerBase,
        *,
        examples: Sequence[Example],
        lines: RolloutLines,
    ) -> None:
        self._task, self._rewards, self._tokenizer = config.task, rewards, tokenizer
        self._examples, self._seed, self.lines = examples, config.train.seed, lines
        self.generators: Generators | None = None
        """Who answers the prompts of steps; None: the ranks."""
        if self._task.uses_generators:
            # Here: it needs pyzmq, which is an extra.
            from hfdist.tune.generators.generators import Generators

            self.generators = Generators(config, read_prompts=self._read_prompts, seeds_of=self._seeds_of)
        own = ("reward_std", "dead_groups", "completion_tokens", "cut_off")
        self.names = ("reward", *(f"rewards/{reward.name}" for reward in rewards), *own)
        """Names of the figures that `answer` gives."""

    def begin(self, training: Training) -> None:
        """Find the limits of answers; ConfigError: they leave no room for a prompt."""
        self._training, self._topology = training, training.strategy.topology
        where, own = "task.max_new_tokens", self._task.max_new_tokens
        self._limits = find_limits(training.model, self._tokenizer, own, where=where)
        self._uses_cache = can_generate(cast(PreTrainedModel, training.model), self._topology)
        if self.generators is not None:
            self.generators.begin(training, self._limits)

    def answer(
        self, batches: Sequence[Batch], forwarding: Callable[[], AbstractContextManager[Forward]]
    ) -> tuple[list[Batch], dict[str, list[float]]]:
        """Answer all prompts of a step of this data rank. A collective.

        Args:
            batches: batches with a prompt and its reference in each row.
            forwarding: makes a context in which forwards run in the layout; it gives the function that runs them.

        Returns:
            Batches of answers with their rewards; and figures of the answers by name, on one rank of each model
            replica.
        """
        count = self._task.num_generations
        room = self._limits.room()
        examples = [example for batch in batches for example in read_examples(batch, room)]
        examples = self._with_columns(examples, [batch[DOCUMENTS].tolist() for batch in batches if DOCUMENTS in batch])
        repeated = [example for example in examples for _ in range(count)]
        prompts = [example.prompt for example in repeated]
        answers, old = self._ask([example.prompt for example in examples], prompts, forwarding)
        # A lane that has ended gives nothing to answer.
        live = [place for place, example in enumerate(repeated) if example.prompt]
        generations = self._describe([repeated[place] for place in live], [answers[place] for place in live])
        scores, of_live = self._score(generations)
        steps: list[Steps] = [[] for _ in repeated]
        for place, own in zip(live, of_live, strict=True):
            steps[place] = own
        self.lines.write_some(generations, scores, self._training.state)
        # A number is the one step of its answer.
        are_whole = all(
            len(own) == 1 and own[0][0] == len(one.text) for own, one in zip(of_live, generations, strict=True)
        )
        built, first = [], 0
        for of_prompts in batches:
            rows = slice(first, first + len(of_prompts["input_ids"]) * count)
            batch = make_rows(prompts[rows], answers[rows], fill_id=self._fill_id)
            if self._task.mask_truncated:
                batch[TRAINS] = torch.tensor([self._has_ended(answer) for answer in answers[rows]])
            if old is not None:
                batch[OLD_LOG_PROBABILITIES] = at_targets(batch["labels"], old[rows])
            own_steps, most = steps[rows], max(1, *map(len, steps))
            batch |= of_answers(own_steps) if are_whole else of_steps(batch, own_steps, self._text, num_columns=most)
            built.append(batch)
            first = rows.stop
        return built, self._figures(scores, [answers[place] for place in live], built)

    def _ask(
        self,
        prompts: Sequence[list[int]],
        repeated: Sequence[list[int]],
        forwarding: Callable[[], AbstractContextManager[Forward]],
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Give an answer to each of `repeated`, and log-probabilities of its tokens if a generator gave it."""
        if self.generators is not None:
            numbers = self._numbers(len(prompts))
            given = self.generators.answer(numbers, prompts)
            old = [values for number in numbers for values in given[number]["log_probabilities"]]
            return [tokens for number in numbers for tokens in given[number]["completions"]], old
        with forwarding() as forward:
            # All ranks sample equally many rows.
            sampled = self._sample([prompt or [self._fill_id] for prompt in repeated], forward)
        return [answer if prompt else [] for prompt, answer in zip(repeated, sampled, strict=True)], None

    def _sample(self, prompts: Sequence[list[int]], forward: Forward) -> list[list[int]]:
        """Sample one answer to each of `prompts` on the ranks."""
        numbers = self._numbers(len(prompts) // self._task.num_generations)
        return sample_completions(
            prompts,
            [seed for number in numbers for seed in self._seeds_of(number)],
            forward,
            self._limits,
            Sampling(temperature=self._task.temperature, top_k=self._task.top_k, top_p=self._task.top_p),
            topology=self._topology,
            rows_at_once=self._training.strategy.batch.micro_batch_size * self._task.num_generations,
            uses_cache=self._uses_cache,
        )

    def answer_held_out(self, forward: Forward) -> dict[str, list[float]]:
        """Answer the held-out prompts greedily; give figures of all answers, on all ranks. A collective."""
        prompts = [example.prompt for example in self._examples]
        answers = continue_prompts(
            prompts,
            forward,
            self._limits,
            topology=self._topology,
            rows_at_once=self._training.args.per_device_eval_batch_size,
            uses_cache=self._uses_cache,
        )
        # These lack the token that ended them, which a reward model reads.
        whole = [
            [*answer, self._tokenizer.eos_token_id] if len(answer) < self._limits.max_new_tokens else answer
            for answer in answers
        ]
        generations = self._describe(self._examples, whole)
        scores: dict[str, list[float]] = on_rank_zero(lambda: self._score_here(generations)[0])
        return scores | {"completion_tokens": [float(len(tokens)) for tokens in whole]}

    def _read_prompts(self, batch: Batch) -> list[list[int]]:
        return [example.prompt for example in read_examples(batch, self._limits.room())]

    @property
    def _fill_id(self) -> int:
        tokenizer = self._tokenizer
        return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def _numbers(self, num_prompts: int) -> list[int]:
        """Numbers in the run's data of the prompts that this rank has read last."""
        topology = self._topology
        first = self._training.num_samples() - num_prompts * topology.data
        return [first + place * topology.data + topology.data_rank for place in range(num_prompts)]

    def _seeds_of(self, number: int) -> list[int]:
        """Give a seed for each answer to the prompt with this number."""
        texts = (f"{self._seed}:{number}:{own}" for own in range(self._task.num_generations))
        digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        return [int.from_bytes(digest, "little") for digest in digests]

    def _with_columns(self, examples: list[Example], documents: Sequence[Sequence[int]]) -> list[Example]:
        """Add the other columns of the rows, where the stream tells which documents they are. A collective then."""
        if not documents:
            return examples
        numbers = list(chain.from_iterable(documents))
        columns: dict[int, Mapping[str, object]] = {-1: {}}
        known = [number for number in numbers if number >= 0]
        # A file that one rank cannot read ends all of them.
        stream = self._training.stream
        assert stream is not None
        on_all_ranks(lambda: columns.update(stream.corpus.columns(known)))
        return [replace(one, columns=columns[number]) for one, number in zip(examples, numbers, strict=True)]

    def _describe(self, examples: Sequence[Example], answers: Sequence[Sequence[int]]) -> list[Generation]:
        """Make what rewards read of answers."""
        return [
            Generation(
                prompt=self._text(example.prompt),
                text=self._text(answer),
                reference=self._text(example.reference),
                columns=example.columns,
                token_ids=(*example.prompt, *answer),
                num_tokens=len(answer),
                most_tokens=self._task.max_new_tokens,
            )
            for example, answer in zip(examples, answers, strict=True)
        ]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _score_here(self, generations: Sequence[Generation]) -> tuple[dict[str, list[float]], list[Steps]]:
        """Score on this rank: the weighted sums and each reward by its name; and the steps of all rewards together."""
        scores = [reward(generations) for reward in self._rewards]
        weights = [reward.weight for reward in self._rewards]
        steps = [
            add_up(own, weights, len(one.text)) for one, own in zip(generations, zip(*scores, strict=True), strict=True)
        ]
        named = {f"rewards/{r.name}": list(map(total, own)) for r, own in zip(self._rewards, scores, strict=True)}
        return {"reward": list(map(total, steps))} | named, steps

    def _score(self, generations: Sequence[Generation]) -> tuple[dict[str, list[float]], list[Steps]]:
        """Score on one rank of each model replica, and give all its ranks the same."""
        topology = self._topology
        found = on_all_ranks(
            lambda: [topology.data_rank, self._score_here(generations) if topology.is_first_of_replica else None]
        )
        return next(scores for rank, scores in found if scores is not None and rank == topology.data_rank)

    def _figures(
        self, scores: dict[str, list[float]], answers: Sequence[Sequence[int]], batches: Sequence[Batch]
    ) -> dict[str, list[float]]:
        """Give figures of the answers to what was a prompt, and of their groups, which have the same for each."""
        if not self._topology.is_first_of_replica:
            return {}
        count = self._task.num_generations
        is_answered = torch.cat([(batch["labels"] != IGNORED).any(1) for batch in batches])
        totals = torch.cat([batch[REWARDS].sum(1) for batch in batches]).view(-1, count)
        alike = torch.cat([~differ(batch, count) for batch in batches])
        of_groups = {"reward_std": totals.std(1), "dead_groups": alike.float()}
        lengths = [float(len(answer)) for answer in answers]
        return {
            **scores,
            "completion_tokens": lengths,
            "cut_off": [float(not self._has_ended(one)) for one in answers],
            **{name: own.repeat_interleave(count)[is_answered].tolist() for name, own in of_groups.items()},
        }

    def _has_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self._limits.end_ids
