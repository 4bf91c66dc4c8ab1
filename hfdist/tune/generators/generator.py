"""A generator: a process without a process group that answers prompts by the newest policy, until its run ends.

A prompt's completions follow from the policy and the seeds alone, as in `generation/sampling.py`, so it does not matter
which generator gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.data import cache_dir
from hfdist.config.train import Precision
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.resolve import resolve_model
from hfdist.models.stacked_experts import use_products
from hfdist.strategies.engine import Batch, Value
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_generate, continue_rows
from hfdist.trainer.generation.sampling import Sampling, TokenLogProbabilities, make_score
from hfdist.tune.generators.messages import Link, pack, unpack
from hfdist.tune.generators.settings import Settings


class Policy(Protocol):
    """Versions of the policy, wherever they are."""

    def read(self, rollback: int, version: int, model: nn.Module, /) -> None:
        """Put the weights of a version into a whole model; FileNotFoundError: it has been removed."""


class Generator:
    """The model of one generator, which reads the policy as it is asked for.

    Args:
        settings: of the run.
        policy: versions of its weights.
        device: number of the GPU, if there are any; more than there are begin with the first again.
    """

    def __init__(self, settings: Settings, policy: Policy, *, device: int) -> None:
        self._config, self._limits, self._policy = settings.config, settings.limits, policy
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", device % torch.cuda.device_count())
        self._model = _build(settings).to(self._device).eval()  # type: ignore[arg-type]  # as of torch's stubs
        self._uses_cache = can_generate(self._model, Topology())
        self._version_read: tuple[int, int] | None = None
        """Rollback and version of the policy that the model has."""
        self._sampling = Sampling.of(self._config.task)

    def answer(self, rollback: int, version: int, prompts: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        """Answer prompts by a version of the policy.

        Args:
            rollback: see `PolicyFiles`.
            version: version of the policy.
            prompts: each with its number, its tokens, and a seed for each completion.

        Returns:
            For each prompt its number, its completions as tokens, and the log-probability of each token.

        Raises:
            FileNotFoundError: the version has been removed.
        """
        if self._version_read != (rollback, version):
            # A read that fails leaves a part of the new weights.
            self._version_read = None
            self._policy.read(rollback, version, self._model)
            self._version_read = rollback, version
        rows = [prompt["tokens"] for prompt in prompts for _ in prompt["seeds"]]
        drawn = TokenLogProbabilities(self._config.task.temperature)
        score, extras = make_score([seed for prompt in prompts for seed in prompt["seeds"]], self._sampling)
        completions = continue_rows(
            rows,
            self._forward,
            self._limits,
            score=drawn.recording(score),
            extras=extras,
            topology=Topology(),
            rows_at_once=len(rows),
            uses_cache=self._uses_cache,
        )
        log_probabilities = drawn.log_probabilities(completions)
        answers, first = [], 0
        for prompt in prompts:
            own = slice(first, first + len(prompt["seeds"]))
            first = own.stop
            given = {"completions": completions[own], "log_probabilities": log_probabilities[own]}
            answers.append({"number": prompt["number"], **given})
        return answers

    @torch.no_grad()
    def _forward(
        self, batch: Batch, function: Callable[[nn.Module, Batch], Value], *, as_whole: bool = False
    ) -> list[Value]:
        precision = self._config.train.precision
        dtype = torch.float16 if precision is Precision.fp16 else torch.bfloat16
        own = {name: tensor.to(self._device) for name, tensor in batch.items()}
        with torch.autocast(self._device.type, dtype, enabled=precision is not Precision.fp32):
            return [function(self._model, own)]


def _build(settings: Settings) -> PreTrainedModel:
    config = settings.config
    start = resolve_model(config.model, cache_dir=cache_dir(config.data))
    start.fetch_weights()
    architecture = find_architecture(start.model, sequence_length=config.data.sequence_length)
    architecture.get_text_config().vocab_size = settings.vocabulary
    model = build_model(start.model, architecture, seed=config.train.seed, trained=TrainableParameters.of(config))
    # As the policy that is trained: the ratio of their probabilities counts.
    use_products(model)
    return model


def serve(generator: Generator, broker: Link) -> None:
    """Answer what the broker sends, until it says that the training has ended; OSError: the connection has ended."""
    broker.send(pack({"kind": "ready"}))
    while True:
        asked = unpack(broker.recv())
        if "ended" in asked:
            return
        policy = {"rollback": asked["rollback"], "version": asked["version"]}
        try:
            answers = generator.answer(**policy, prompts=asked["prompts"])
        except FileNotFoundError:
            # This generator was slow: a newer version has taken its place.
            broker.send(pack({"kind": "ready"}))
        else:
            broker.send(pack({"kind": "answers", **policy, "answers": answers}))
