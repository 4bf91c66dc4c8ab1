"""A generator: a process without a process group that answers prompts by the newest policy, until its run ends.

A prompt's completions follow from the policy and the seeds alone, as in `generation/sampling.py`, so it does not matter
which generator gives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.data import cache_dir
from hfdist.config.train import Precision
from hfdist.data.documents.examples import Example
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.resolve import resolve_model
from hfdist.models.stacked_experts import use_products
from hfdist.models.tokenizer import load_pretrained_tokenizer
from hfdist.strategies.engine import Batch, Value
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_use_cache
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.tune.acting import Acting
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answers import write_answers
from hfdist.tune.generators.settings import Settings
from hfdist.tune.prompt_seeds import episode_name


class Policy(Protocol):
    """Gives versions of the policy, from a disk or from another machine."""

    def read(self, rollback: int, version: int, model: nn.Module, /) -> None:
        """Put the weights of a version into a whole model; FileNotFoundError: it has been removed."""


class Generator:
    """Answers prompts by a model that reads the version of the policy that it is asked for.

    Args:
        settings: settings of the run's generators.
        policy: versions of the policy's weights.
        device: number of the GPU, if there are any; numbers above the last GPU begin with the first again.
    """

    def __init__(self, settings: Settings, policy: Policy, *, device: int) -> None:
        self._config, self._policy = settings.config, policy
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", device % torch.cuda.device_count())
        # Before the model: others' files are tried in a process that is forked.
        tokenizer = _load_tokenizer(settings) if self._config.task.environment is not None else None
        self._model = _build(settings).to(self._device).eval()  # type: ignore[arg-type]  # as of torch's stubs
        self._sampler = Sampler(
            limits=settings.limits,
            sampling=Sampling.of(self._config.task),
            topology=Topology(),
            uses_cache=can_use_cache(self._model, Topology()),
            records=True,
        )
        self._acting: Acting | None = None
        """Plays episodes with the environment; None: an answer is one turn."""
        if tokenizer is not None:
            self._acting = Acting(self._config, tokenizer, self._sampler, are_chats=settings.are_chats)
        self._version_read: tuple[int, int] | None = None
        """Rollback and version of the policy that the model has."""

    def answer(self, rollback: int, version: int, prompts: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        """Answer prompts by a version of the policy.

        Args:
            rollback: how often the run has gone back to an earlier step.
            version: version of the policy: the number of steps that have trained it.
            prompts: each with its number, its tokens, and a seed for each completion; with an environment also the
                tokens of the reference, and the other columns of the row.

        Returns:
            For each prompt its number, and its answers as `write_answers` describes them.

        Raises:
            FileNotFoundError: the version has been removed.
        """
        if self._version_read != (rollback, version):
            # A read that fails leaves a part of the new weights.
            self._version_read = None
            self._policy.read(rollback, version, self._model)
            self._version_read = rollback, version
        answers, prompts_read = self._draw(prompts)
        described, first = [], 0
        for prompt in prompts:
            rows = slice(first, first + len(prompt["seeds"]))
            first = rows.stop
            written = write_answers(answers[rows], None if prompts_read is None else prompts_read[rows])
            described.append({"number": prompt["number"], **written})
        return described

    def _draw(self, prompts: Sequence[dict[str, Any]]) -> tuple[list[Answer], list[list[int]] | None]:
        """Give all answers to all prompts; for episodes also the prompt of each as the model has read it, else None."""
        seeds = [seed for prompt in prompts for seed in prompt["seeds"]]
        if self._acting is None:
            rows = [prompt["tokens"] for prompt in prompts for _ in prompt["seeds"]]
            drawn = self._sampler.draw(rows, seeds, self._forward, rows_at_once=len(rows))
            return [Answer.of(*one) for one in drawn], None
        examples, names = [], []
        for prompt in prompts:
            columns = json.loads(prompt["columns"])
            example = Example(prompt=prompt["tokens"], reference=prompt["reference"], columns=columns)
            examples += [example] * len(prompt["seeds"])
            names += [episode_name(self._config.train.seed, prompt["number"])] * len(prompt["seeds"])
        read, answers = self._acting.answer(examples, names, seeds, self._forward, rows_at_once=len(examples))
        return answers, [example.prompt for example in read]

    @torch.no_grad()
    def _forward(
        self, batch: Batch, function: Callable[[nn.Module, Batch], Value], *, as_whole: bool = False
    ) -> list[Value]:
        precision = self._config.train.precision
        dtype = torch.float16 if precision is Precision.fp16 else torch.bfloat16
        moved = {name: tensor.to(self._device) for name, tensor in batch.items()}
        with torch.autocast(self._device.type, dtype, enabled=precision is not Precision.fp32):
            return [function(self._model, moved)]


def _load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    return load_pretrained_tokenizer(settings.config.model, cache_dir=cache_dir(settings.config.data))


def _build(settings: Settings) -> PreTrainedModel:
    """Build the run's model with the weights that it begins with; versions hold those that are trained."""
    config = settings.config
    start = resolve_model(config.model, cache_dir=cache_dir(config.data))
    start.fetch_weights()
    architecture = find_architecture(start.model, sequence_length=config.data.sequence_length)
    architecture.get_text_config().vocab_size = settings.vocabulary
    model = build_model(start.model, architecture, seed=config.train.seed, trained=TrainableParameters.of(config))
    # As the policy that is trained: the ratio of their probabilities counts.
    use_products(model)
    return model
