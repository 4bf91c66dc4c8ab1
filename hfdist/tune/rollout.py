"""Answers to the prompts of a step, their rewards, and the batches that they become.

Which answer a prompt gets follows from the weights, the run's seed and the prompt's number in the run's data alone: no
layout changes it. An answer is a row: the prompt, the answer, and a filling, which counts as another document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from hfdist.collectives import on_all_ranks, on_rank_zero
from hfdist.config.run import RunConfig
from hfdist.data.documents.examples import Example
from hfdist.data.documents.first_examples import are_chats
from hfdist.data.stream.token_stream import DOCUMENTS
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.rewards import Generation, Reward
from hfdist.rewards.registry import Steps
from hfdist.strategies.engine import Batch, Forward
from hfdist.topology import Topology
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.row_images import RowImages
from hfdist.trainer.generation.sampling import Sampler
from hfdist.trainer.generation.shares import share_of_rank
from hfdist.trainer.training import Training
from hfdist.tune.acting import Acting
from hfdist.tune.answer import Answer
from hfdist.tune.prompt_seeds import answer_seeds, episode_name, prompt_numbers
from hfdist.tune.rollout_lines import RolloutLines
from hfdist.tune.rollout_rows import (
    OLD_LOG_PROBABILITIES,
    REWARDS,
    TRAINS,
    at_targets,
    fill_id,
    make_image_rows,
    make_rows,
    read_examples,
)
from hfdist.tune.sampler import answer_prompts, make_sampler
from hfdist.tune.scoring import Scoring
from hfdist.tune.step_rewards import differ, of_answers, of_steps
from hfdist.watch.heartbeat import ACTING

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
    _sampler: Sampler
    _image_tokens: ImageTokens | None = None
    """What images of the run become; None: it has none."""

    def __init__(
        self,
        config: RunConfig,
        rewards: Sequence[Reward],
        tokenizer: PreTrainedTokenizerBase,
        *,
        examples: Sequence[Example],
        lines: RolloutLines,
    ) -> None:
        self._config, self._task, self._tokenizer = config, config.task, tokenizer
        self._scoring = Scoring(rewards, tokenizer, config.task.max_new_tokens)
        self._examples, self._seed, self.lines = examples, config.train.seed, lines
        self.generators: Generators | None = None
        """Who answers the prompts of steps; None: the ranks."""
        if self._task.uses_generators:
            # Here: it needs pyzmq, which is an extra.
            from hfdist.tune.generators.generators import Generators

            self.generators = Generators(config, tokenizer, read_examples=self._read_row, seeds_of=self._seeds_of)
        self._acting: Acting | None = None
        """Plays episodes with the environment, from `begin` on; None: an answer is one turn."""
        # One answer alone is compared with none.
        of_groups = ("reward_std", "dead_groups") if config.task.num_generations > 1 else ()
        own = (*of_groups, "completion_tokens", "cut_off")
        self.names = (*self._scoring.names, *own, *(() if self._task.environment is None else Acting.names))
        """Names of the figures that `answer` gives."""

    def begin(self, training: Training) -> None:
        """Find the limits of answers.

        ConfigError: they leave no room for a prompt, or the chat template cannot write several turns.
        """
        self._training, self._topology = training, training.strategy.topology
        self._sampler = make_sampler(training, self._tokenizer, self._task)
        self._image_tokens = None if training.stream is None else training.stream.images
        if self._task.environment is not None:
            self._acting = Acting(
                self._config,
                self._tokenizer,
                self._sampler,
                are_chats=training.stream is not None and bool(are_chats(training.stream.corpus)),
                waiting=partial(training.waiting, ACTING),
            )
        if self.generators is not None:
            self.generators.begin(training, self._sampler.limits)

    def _images_of(self, examples: Sequence[Example]) -> RowImages | None:
        if self._image_tokens is None:
            return None
        return RowImages(self._image_tokens, [example.images() for example in examples])

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
        room = self._sampler.limits.room()
        examples = [example for batch in batches for example in read_examples(batch, room)]
        documents = list(chain.from_iterable(batch[DOCUMENTS].tolist() for batch in batches if DOCUMENTS in batch))
        if documents:
            bare, examples = examples, []
            # A file that one rank cannot read ends all of them.
            on_all_ranks(lambda: examples.extend(self._with_columns(bare, documents)))
        repeated, answers = self._ask(examples, forwarding)
        # A lane that has ended gives nothing to answer.
        live = [place for place, example in enumerate(repeated) if example.prompt]
        answered = [answers[place] for place in live]
        generations = self._scoring.describe([repeated[place] for place in live], answered)
        scores, of_live = self._score(generations, answered)
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
            batch = self._batch(repeated[rows], answers[rows])
            own_steps, most = steps[rows], max(1, *map(len, steps))
            if are_whole:
                batch |= of_answers(own_steps)
            else:
                batch |= of_steps(batch, own_steps, self._scoring.text, num_columns=most)
            built.append(batch)
            first = rows.stop
        if not self._topology.is_first_of_replica:
            return built, {}
        cut_off = [float(not one.has_ended and one.fault is None) for one in answered]
        figures = scores | self._figures(answered) | {"cut_off": cut_off} | self._figures_of_groups(built, live)
        return built, figures

    def _batch(self, examples: Sequence[Example], answers: Sequence[Answer]) -> Batch:
        prompts, images = [example.prompt for example in examples], self._images_of(examples)
        if images is None:
            batch = make_rows(prompts, answers, fill_id=self._fill_id)
        else:
            needs_image = self._training.strategy.calls_alike and self._topology.data > 1
            batch = make_image_rows(prompts, answers, images, fill_id=self._fill_id, needs_image=needs_image)
        if self._task.mask_truncated or self._acting is not None:
            must_end = self._task.mask_truncated
            trains = [one.fault is None and (one.has_ended or not must_end) for one in answers]
            # A lane that has ended has no answer that could fail.
            batch[TRAINS] = torch.tensor([own or not prompt for own, prompt in zip(trains, prompts, strict=True)])
        if self.generators is not None:
            batch[OLD_LOG_PROBABILITIES] = at_targets(batch["labels"], [one.log_probabilities or [] for one in answers])
        return batch

    def _ask(
        self, examples: Sequence[Example], forwarding: Callable[[], AbstractContextManager[Forward]]
    ) -> tuple[list[Example], list[Answer]]:
        """Give the examples, each as often as it is answered and as the model has read it, and all answers."""
        count, numbers = self._task.num_generations, prompt_numbers(self._training, len(examples))
        repeated = [example for example in examples for _ in range(count)]
        if self.generators is not None:
            given = self.generators.answer(numbers, examples)
            answers = [one.answer for number in numbers for one in given[number]]
            if self._acting is not None:
                read = [one.num_prompt_tokens for number in numbers for one in given[number]]
                repeated = [replace(one, prompt=one.prompt[:n]) for one, n in zip(repeated, read, strict=True)]
                self._acting.warn_of_failed(repeated, answers)
            return repeated, answers
        seeds = [seed for number in numbers for seed in self._seeds_of(number)]
        with forwarding() as forward:
            rows_at_once = self._training.strategy.batch.micro_batch_size * count
            if self._acting is None:
                prompts, fill = [example.prompt for example in repeated], self._fill_id
                answers = answer_prompts(
                    self._sampler,
                    prompts,
                    seeds,
                    forward,
                    rows_at_once=rows_at_once,
                    fill_id=fill,
                    images=self._images_of(repeated),
                )
                return repeated, answers
            names = [episode_name(self._seed, number) for number in numbers for _ in range(count)]
            return self._acting.answer(repeated, names, seeds, forward, rows_at_once=rows_at_once)

    def answer_held_out(self, forward: Forward) -> dict[str, list[float]]:
        """Answer the held-out prompts greedily; give figures of all answers, on all ranks. A collective."""
        rows_at_once = self._training.args.per_device_eval_batch_size
        if self._acting is not None:
            return self._act_held_out(self._acting, forward, rows_at_once)
        prompts, limits = [example.prompt for example in self._examples], self._sampler.limits
        images: list[RowImages | None] = []
        share = share_of_rank(self._examples, self._topology)
        # A file that one rank cannot read ends all of them.
        on_all_ranks(lambda: images.append(self._images_of(share)))
        answers = continue_prompts(
            prompts,
            forward,
            limits,
            topology=self._topology,
            rows_at_once=rows_at_once,
            uses_cache=self._sampler.uses_cache,
            images=images[0],
        )
        # These lack the token that ended them, which a reward model reads.
        ends = [[self._tokenizer.eos_token_id] if len(own) < limits.max_new_tokens else [] for own in answers]
        whole = [Answer.of(own + end, end_ids=limits.end_ids) for own, end in zip(answers, ends, strict=True)]
        generations = self._scoring.describe(self._examples, whole)
        scores: dict[str, list[float]] = on_rank_zero(lambda: self._scoring.score(generations, whole)[0])
        return scores | self._figures(whole)

    def _act_held_out(self, acting: Acting, forward: Forward, rows_at_once: int) -> dict[str, list[float]]:
        """Play an episode for each held-out prompt, each data rank a share of them."""
        topology, room = self._topology, self._sampler.limits.room()
        share = -(-len(self._examples) // topology.data)
        first = topology.data_rank * share
        own = [
            replace(example, prompt=example.prompt if room is None else example.prompt[-room:])
            for example in self._examples[first : first + share]
        ]
        names = [f"{self._seed}:held-out:{first + place}" for place in range(len(own))]
        read, answers = acting.answer(own, names, None, forward, rows_at_once=rows_at_once)
        generations = self._scoring.describe(read, answers)
        is_first = topology.is_first_of_replica
        told = on_all_ranks(
            lambda: self._scoring.score(generations, answers)[0] | self._figures(answers) if is_first else None
        )
        # Data ranks are in the order of their first ranks.
        of_shares = [figures for figures in told if figures is not None]
        return {name: [value for figures in of_shares for value in figures[name]] for name in of_shares[0]}

    def _read_row(self, batch: Batch) -> list[Example]:
        """Give the examples of rows that are read ahead; DataError: a file cannot be read."""
        examples = read_examples(batch, self._sampler.limits.room())
        is_bare = self._acting is None or DOCUMENTS not in batch
        return examples if is_bare else self._with_columns(examples, batch[DOCUMENTS].tolist())

    @property
    def _fill_id(self) -> int:
        return fill_id(self._tokenizer)

    def _seeds_of(self, number: int) -> list[int]:
        return answer_seeds(self._seed, number, self._task.num_generations)

    def _with_columns(self, examples: Sequence[Example], documents: Sequence[int]) -> list[Example]:
        """Add the other columns of the rows, which are these documents; DataError: a file cannot be read."""
        stream = self._training.stream
        assert stream is not None
        columns = stream.corpus.columns([number for number in documents if number >= 0]) | {-1: {}}
        return [replace(one, columns=columns[number]) for one, number in zip(examples, documents, strict=True)]

    def _score(
        self, generations: Sequence[Generation], answers: Sequence[Answer]
    ) -> tuple[dict[str, list[float]], list[Steps]]:
        """Score on one rank of each model replica, and give all its ranks the same."""
        topology, is_first = self._topology, self._topology.is_first_of_replica
        found = on_all_ranks(
            lambda: [topology.data_rank, self._scoring.score(generations, answers) if is_first else None]
        )
        return next(scores for rank, scores in found if scores is not None and rank == topology.data_rank)

    def _figures(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        of_acting = {} if self._acting is None else self._acting.figures(answers)
        return {"completion_tokens": [float(len(one.tokens)) for one in answers], **of_acting}

    def _figures_of_groups(self, batches: Sequence[Batch], live: Sequence[int]) -> dict[str, list[float]]:
        """Give figures of groups, which all answers of one have, in the places `live` of all answers."""
        count = self._task.num_generations
        if count == 1:
            return {}
        totals = torch.cat([batch[REWARDS].sum(1) for batch in batches]).view(-1, count)
        alike = torch.cat([~differ(batch, count) for batch in batches])
        of_groups = {"reward_std": totals.std(1), "dead_groups": alike.float()}
        return {name: own.repeat_interleave(count)[live].tolist() for name, own in of_groups.items()}
