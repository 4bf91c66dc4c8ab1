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
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.config.batch import IGNORED
from hfdist.config.run import RunConfig
from hfdist.data.documents.examples import Example
from hfdist.data.stream.token_stream import DOCUMENTS
from hfdist.rewards import Generation, Reward
from hfdist.strategies.engine import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_generate
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits, find_limits
from hfdist.trainer.generation.sampling import Sampling, sample_completions
from hfdist.trainer.step.step_lines import StepLines
from hfdist.trainer.training import Training

if TYPE_CHECKING:
    from hfdist.tune.generators.generators import Generators

ADVANTAGES = "advantages"
"""Key in a batch: the advantage of each answer; shape [rows]."""
TRAINS = "trains"
"""Key in a batch, if answers that were cut off do not train: whether an answer trains; shape [rows]."""
OLD_LOG_PROBABILITIES = "old_log_probabilities"
"""Key in a batch of generators' answers: log-probabilities of the tokens when they were drawn; shape [rows, tokens]."""

_SHOWN_PROMPTS = 2
"""Number of prompts of each logged step whose answers are written to the file."""


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
        if self._task.generators:
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
    ) -> tuple[list[Batch], torch.Tensor, dict[str, list[float]]]:
        """Answer all prompts of a step of this data rank. A collective.

        Args:
            batches: batches with a prompt and its reference in each row.
            forwarding: makes a context in which forwards run in the layout; it gives the function that runs them.

        Returns:
            Batches of answers without advantages; rewards of shape [prompts, answers]; and figures of the answers by
            name, on one rank of each model replica.
        """
        count = self._task.num_generations
        room = self._limits.room()
        examples = [example for batch in batches for example in split_examples(batch, room)]
        examples = self._with_columns(examples, [batch[DOCUMENTS].tolist() for batch in batches if DOCUMENTS in batch])
        repeated = [example for example in examples for _ in range(count)]
        prompts = [example.prompt for example in repeated]
        answers, old = self._ask([example.prompt for example in examples], prompts, forwarding)
        # A lane that has ended gives nothing to answer.
        live = [place for place, example in enumerate(repeated) if example.prompt]
        generations = self._describe([repeated[place] for place in live], [answers[place] for place in live])
        scores = self._score(generations)
        rewards = torch.zeros(len(repeated))
        rewards[live] = torch.tensor(scores["reward"], dtype=torch.float32)
        rewards = rewards.view(-1, count)
        figures = self._figures(scores, [answers[place] for place in live])
        if self._topology.is_first_of_replica:
            of_groups = {"reward_std": rewards.std(1), "dead_groups": (rewards == rewards[:, :1]).all(1).float()}
            figures |= {name: own.repeat_interleave(count)[live].tolist() for name, own in of_groups.items()}
        self.lines.write_some(generations, scores, self._training.state)
        built, first = [], 0
        for of_prompts in batches:
            rows = slice(first, first + len(of_prompts["input_ids"]) * count)
            batch = answer_rows(prompts[rows], answers[rows], fill_id=self._fill_id)
            if self._task.mask_truncated:
                batch[TRAINS] = torch.tensor([self._has_ended(answer) for answer in answers[rows]])
            if old is not None:
                batch[OLD_LOG_PROBABILITIES] = _at_targets(batch["labels"], old[rows])
            built.append(batch)
            first = rows.stop
        return built, rewards, figures

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
        scores: dict[str, list[float]] = on_rank_zero(lambda: self._score_here(generations))
        return scores | {"completion_tokens": [float(len(tokens)) for tokens in whole]}

    def _read_prompts(self, batch: Batch) -> list[list[int]]:
        return [example.prompt for example in split_examples(batch, self._limits.room())]

    @property
    def _fill_id(self) -> int:
        return fill_id(self._tokenizer)

    def _numbers(self, num_prompts: int) -> list[int]:
        return prompt_numbers(self._training, num_prompts)

    def _seeds_of(self, number: int) -> list[int]:
        return answer_seeds(self._seed, number, self._task.num_generations)

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

        def text(ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

        return [
            Generation(
                prompt=text(example.prompt),
                text=text(answer),
                reference=text(example.reference),
                columns=example.columns,
                token_ids=(*example.prompt, *answer),
                num_tokens=len(answer),
                most_tokens=self._task.max_new_tokens,
            )
            for example, answer in zip(examples, answers, strict=True)
        ]

    def _score_here(self, generations: Sequence[Generation]) -> dict[str, list[float]]:
        """Score on this rank: the weighted sums, and each reward by its name."""
        scores = {f"rewards/{reward.name}": reward(generations) for reward in self._rewards}
        weights = [reward.weight for reward in self._rewards]
        sums = [
            sum(weight * score for weight, score in zip(weights, own, strict=True))
            for own in zip(*scores.values(), strict=True)
        ]
        return {"reward": sums} | scores

    def _score(self, generations: Sequence[Generation]) -> dict[str, list[float]]:
        """Score on one rank of each model replica, and give all its ranks the same."""
        topology = self._topology
        found = on_all_ranks(
            lambda: [topology.data_rank, self._score_here(generations) if topology.is_first_of_replica else None]
        )
        return next(scores for rank, scores in found if scores is not None and rank == topology.data_rank)

    def _figures(self, scores: dict[str, list[float]], answers: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        if not self._topology.is_first_of_replica:
            return {}
        lengths = [float(len(answer)) for answer in answers]
        return {**scores, "completion_tokens": lengths, "cut_off": [float(not self._has_ended(one)) for one in answers]}

    def _has_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self._limits.end_ids


class RolloutLines(StepLines):
    """Writes some answers of each logged step, with their rewards, into rollouts.jsonl."""

    def __init__(self, path: Path, every: int, num_generations: int) -> None:
        super().__init__(path)
        self._every, self._count = every, _SHOWN_PROMPTS * num_generations

    def write_some(
        self, generations: Sequence[Generation], scores: dict[str, list[float]], state: TrainerState
    ) -> None:
        """Write the answers to the first prompts of rank 0, with the step that trains on them."""
        step = state.global_step + 1
        if step % self._every == 0:
            for place, one in enumerate(generations[: self._count]):
                rewards = {name: values[place] for name, values in scores.items()}
                self.write({"step": step, "prompt": one.prompt, "text": one.text, **rewards})


def fill_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give the token that fills up rows."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def prompt_numbers(training: Training, num_prompts: int) -> list[int]:
    """Give the numbers in the run's data of the prompts that this rank has read last."""
    topology = training.strategy.topology
    first = training.num_samples() - num_prompts * topology.data
    return [first + place * topology.data + topology.data_rank for place in range(num_prompts)]


def answer_seeds(seed: int, number: int, count: int) -> list[int]:
    """Give a seed for each of `count` answers to the prompt with this number, in a run with this seed."""
    texts = (f"{seed}:{number}:{own}" for own in range(count))
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return [int.from_bytes(digest, "little") for digest in digests]


def split_examples(batch: Batch, room: int | None) -> list[Example]:
    """Split each row, of one document, at its first run of targets; of a longer prompt the last `room` tokens stay.

    Nothing is the prompt of a row without targets.
    """
    found = []
    masks = batch["attention_mask"].tolist()
    for ids, labels, mask in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), masks, strict=True):
        stop = sum(mask)
        first = next((place for place in range(stop) if labels[place] != IGNORED), 0)
        end = next((place for place in range(first, stop) if labels[place] == IGNORED), stop)
        prompt = ids[:first] if room is None else ids[:first][-room:]
        found.append(Example(prompt=prompt, reference=ids[first:end] if first else []))
    return found


def answer_rows(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, fill_id: int) -> Batch:
    """Make a batch with a prompt and its answer in each row."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(2, *lengths)
    batch = {
        "input_ids": torch.full((len(lengths), width), fill_id),
        "labels": torch.full((len(lengths), width), IGNORED),
        "position_ids": torch.zeros((len(lengths), width), dtype=torch.int64),
    }
    for row, (prompt, answer, length) in enumerate(zip(prompts, answers, lengths, strict=True)):
        ids = torch.tensor([*prompt, *answer])
        batch["input_ids"][row, :length] = ids
        batch["labels"][row, len(prompt) : length] = ids[len(prompt) :]
        batch["position_ids"][row] = torch.cat([torch.arange(length), torch.arange(width - length)])
    return batch


def _at_targets(labels: torch.Tensor, values: Sequence[Sequence[float]]) -> torch.Tensor:
    """Put the values of each row where its targets are; 0 elsewhere."""
    placed = torch.zeros(labels.shape)
    placed[labels != IGNORED] = torch.tensor([value for row in values for value in row])
    return placed
