"""A generator: a process without a process group that answers prompts with the newest policy, until its run ends.

A prompt's completions follow from the policy and the seeds alone, as in `generation/sampling.py`, so it does not matter
which generator gives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.composition.compose import complete
from hfdist.config.data import cache_dir
from hfdist.config.run import RunConfig
from hfdist.config.schema import from_plain
from hfdist.config.train import Precision
from hfdist.models import TrainableParameters, build_model, find_architecture
from hfdist.models.resolve import resolve_model
from hfdist.strategies.base import Batch, Value
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_generate, continue_rows
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampling, TokenLogProbabilities, make_score
from hfdist.tune.generators.messages import connect, pack, unpack
from hfdist.tune.generators.policy_files import PolicyFiles


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a generator must know of its run; a file of JSON."""

    config: RunConfig
    vocabulary: int
    """Tokens that the model has."""
    limits: GenerationLimits
    policy: Path
    """The folder of `PolicyFiles`."""
    first_device: int
    """GPU of the first generator: those before it are of ranks."""

    def write(self, path: Path, values: Mapping[str, object]) -> None:
        """Write the file; `values` are those of the config."""
        content = {
            "config": values,
            "trust_remote_code": self.config.model.trust_remote_code,
            "vocabulary": self.vocabulary,
            "max_new_tokens": self.limits.max_new_tokens,
            "end_ids": sorted(self.limits.end_ids),
            "most_tokens": self.limits.most_tokens,
            "policy": str(self.policy),
            "first_device": self.first_device,
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        config: RunConfig = from_plain(RunConfig, content["config"])
        # No file may set it, so that it is not among a config's values: this one is of the run itself.
        config.model.trust_remote_code = content["trust_remote_code"]
        names = ("max_new_tokens", "most_tokens")
        return cls(
            config=complete(config),
            vocabulary=content["vocabulary"],
            limits=GenerationLimits(end_ids=frozenset(content["end_ids"]), **{name: content[name] for name in names}),
            policy=Path(content["policy"]),
            first_device=content["first_device"],
        )


class Generator:
    """The model of one generator, and what it has read of the policy."""

    def __init__(self, settings: Settings, index: int) -> None:
        self._config, self._limits = settings.config, settings.limits
        self._files = PolicyFiles(settings.policy)
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", (settings.first_device + index) % torch.cuda.device_count())
        self._model = _build(settings).to(self._device).eval()  # type: ignore[arg-type]  # as of torch's stubs
        self._read: tuple[int, int] | None = None
        task = self._config.task
        self._sampling = Sampling(temperature=task.temperature, top_k=task.top_k, top_p=task.top_p)

    def answer(self, rollback: int, version: int, prompts: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        """Answer prompts by a version of the policy.

        Args:
            rollback: see `PolicyFiles`.
            version: of the policy.
            prompts: each with its number, its tokens, and a seed for each completion.

        Returns:
            Of each prompt its number, completions as tokens, and of each token its log-probability.

        Raises:
            FileNotFoundError: the version is not there any more.
        """
        if self._read != (rollback, version):
            # A read that fails leaves a part of the new weights.
            self._read = None
            self._files.read(rollback, version, self._model)
            self._read = rollback, version
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
            uses_cache=can_generate(self._model, Topology()),
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
    return build_model(start.model, architecture, seed=config.train.seed, trained=TrainableParameters.of(config))


def serve(settings: Settings, folder: Path, index: int, name: str) -> None:
    """Answer what the broker sends, for ever; `folder` has its socket."""
    generator = Generator(settings, index)
    broker = connect(folder, name)
    broker.send(pack({"kind": "ready"}))
    while True:
        asked = unpack(broker.recv())
        where = {"rollback": asked["rollback"], "version": asked["version"]}
        try:
            answers = generator.answer(**where, prompts=asked["prompts"])
        except FileNotFoundError:
            # A slow one: by now there is a newer version.
            broker.send(pack({"kind": "ready"}))
        else:
            broker.send(pack({"kind": "answers", **where, "answers": answers}))
