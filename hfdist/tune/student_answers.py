"""Distillation from the student's own answers: it answers the prompts of some steps' rows (GKD, arXiv 2306.13649).

Whether a step has such answers follows from the run's seed and the step's number. Their tokens follow from the weights,
the seed and the prompt's number in the run's data. So no layout and no resume changes either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hfdist.config.run import RunConfig
from hfdist.data import Corpus, find_source_without_prompts
from hfdist.errors import DataError
from hfdist.strategies.engine import Batch
from hfdist.trainer.generation.sampling import Sampler
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.training import Training
from hfdist.tune.answer import Answer
from hfdist.tune.prompt_seeds import answer_seeds, prompt_numbers
from hfdist.tune.rollout_lines import RolloutLines
from hfdist.tune.rollout_rows import fill_id, make_rows, read_examples
from hfdist.tune.sampler import answer_prompts, make_sampler
from hfdist.tune.scoring import Scoring


def check_prompts(corpus: Corpus) -> None:
    """Check that the rows of all sources have prompts.

    Raises:
        DataError: the rows of a source are plain text or tokens.
    """
    name = find_source_without_prompts(corpus)
    if name is not None:
        what, found = "the model has no prompts to answer (task.on_policy)", "plain text or tokens"
        allowed = "rows with the columns prompt and completion, or another format with prompts"
        hint = "task.on_policy=0 learns from rows of any format"
        raise DataError(what, where=f"data.sources.{name}", found=found, allowed=allowed, hint=hint)


class StudentAnswers:
    """Has the model answer the prompts of a share of the steps, and puts its answers in place of the rows' own.

    Args:
        config: config of the run; `task.*` says in which share of the steps, and how tokens are drawn.
        tokenizer: tokenizer of the model.
        lines: writes some answers for people, on rank 0.
    """

    # What `begin` sets.
    _training: Training
    _sampler: Sampler

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, lines: RolloutLines) -> None:
        self._task, self._seed, self._tokenizer = config.task, config.train.seed, tokenizer
        self._scoring, self.lines = Scoring([], tokenizer, config.task.max_new_tokens), lines

    def begin(self, training: Training) -> None:
        """Make the sampler. A collective. ConfigError: `task.max_new_tokens` leaves no room for a prompt."""
        self._training, self._sampler = training, make_sampler(training, self._tokenizer, self._task)

    def has(self, step: int) -> bool:
        """Whether the model itself answers in a step, by its number from 0."""
        digest = hashlib.blake2b(f"{self._seed}:on_policy:{step}".encode(), digest_size=8).digest()
        # The digest is a number from 0 to 2^64: it is below a share of that in this share of the steps.
        return int.from_bytes(digest, "little") < self._task.on_policy * 2**64

    def answer(self, batches: Sequence[Batch]) -> list[Batch]:
        """Give batches of the same prompts with the model's answers, whose tokens alone are targets. A collective.

        Args:
            batches: batches of this data rank with one document in each row.
        """
        room = self._sampler.limits.room()
        examples = [example for batch in batches for example in read_examples(batch, room)]
        prompts = [example.prompt for example in examples]
        answers = self._sample(prompts)
        # A lane of the data that has ended gives empty prompts.
        live = [place for place, prompt in enumerate(prompts) if prompt]
        shown = self._scoring.describe([examples[place] for place in live], [answers[place] for place in live])
        self.lines.write_some(shown, {}, self._training.state)
        answered, first = [], 0
        for batch in batches:
            rows = slice(first, first + len(batch["input_ids"]))
            answered.append(make_rows(prompts[rows], answers[rows], fill_id=fill_id(self._tokenizer)))
            first = rows.stop
        return answered

    def _sample(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Have the model answer prompts, each by the seed of its number in the run's data. A collective."""
        training = self._training
        seeds: list[int] = []
        for number in prompt_numbers(training, len(prompts)):
            seeds += answer_seeds(self._seed, number, 1)
        with evaluating(training, are_training=True) as forward, training.engine.gathered():
            return answer_prompts(
                self._sampler,
                prompts,
                seeds,
                forward,
                rows_at_once=training.strategy.batch.micro_batch_size,
                fill_id=fill_id(self._tokenizer),
            )
