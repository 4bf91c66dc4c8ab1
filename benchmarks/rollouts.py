"""Completions sampled for reinforcement learning: tokens per second beside `generate`, and without a cache.

python -m benchmarks.rollouts --write
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.strategies.engine import Batch, Function
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampler, Sampling

OURS, GENERATE, GREEDY, RECOMPUTE = "hfdist", "generate", "generate, greedy", "hfdist, no cache"


class Size(NamedTuple):
    """Size of a model and its rollout."""

    width: int
    layers: int
    vocabulary: int
    rows: int
    prompt_tokens: int
    new_tokens: int

    def describe(self) -> str:
        """In words."""
        return (
            f"A Llama of {self.layers} blocks of width {self.width:,}, a vocabulary of {self.vocabulary:,}; "
            f"{self.rows} prompts of {self.prompt_tokens} tokens, {self.new_tokens} new tokens each"
        )


ON_CPU = Size(384, 8, 49_152, 16, 32, 16)
ON_GPU = Size(2048, 16, 128_256, 32, 128, 64)
QUICK = Size(64, 2, 512, 4, 8, 8)


def main() -> None:
    """Measure all, and print or write the section."""
    options = read_options("rollouts", __doc__, rounds=3)
    size = QUICK if options.quick else (ON_GPU if torch.cuda.is_available() else ON_CPU)
    seconds = medians(interleave(_contenders(size), options.rounds))
    publish(options, "rollouts", _section(options, size, seconds), _measures(size, seconds))


def _contenders(size: Size) -> dict[str, Callable[[], float]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    heads = max(size.width // 64, 1)
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
        # None: all continuations are equally long.
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    prompts = torch.randint(size.vocabulary, (size.rows, size.prompt_tokens))

    @torch.no_grad()
    def forward(batch: Batch, function: Function, *, as_whole: bool = False) -> list[Any]:
        return [function(model, {name: tensor.to(device) for name, tensor in batch.items()})]

    def sample(uses_cache: bool) -> list[list[int]]:
        sampler = Sampler(
            limits=GenerationLimits(max_new_tokens=size.new_tokens, end_ids=frozenset(), most_tokens=None),
            sampling=Sampling(),
            topology=Topology(),
            uses_cache=uses_cache,
        )
        drawn = sampler.draw(prompts.tolist(), range(size.rows), forward, rows_at_once=size.rows)
        return [one.tokens for one in drawn]

    def generate(do_sample: bool) -> Any:
        ids = prompts.to(device)
        # 0: all tokens; transformers itself samples from 50.
        how = {"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}
        wanted = GenerationConfig(**how, max_new_tokens=size.new_tokens, use_cache=True, pad_token_id=0)
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted).tolist()

    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: sample(uses_cache=True),
        GENERATE: lambda: generate(do_sample=True),
        GREEDY: lambda: generate(do_sample=False),
        RECOMPUTE: lambda: sample(uses_cache=False),
    }
    return {name: _timed(call, size, device) for name, call in calls.items()}


def _timed(call: Callable[[], Any], size: Size, device: torch.device) -> Callable[[], float]:
    # Tokens come back to the host, so the device has ended, too.
    clock = time.perf_counter if device.type == "cuda" else time.process_time

    def timed() -> float:
        begin = clock()
        rows = call()
        seconds = clock() - begin
        assert all(len(row) in (size.new_tokens, size.prompt_tokens + size.new_tokens) for row in rows)
        return seconds

    return timed


def _unit() -> str:
    return "tokens/s" if torch.cuda.is_available() else "tokens per CPU second"


def _speeds(size: Size, seconds: dict[str, float]) -> dict[str, float]:
    return {name: size.rows * size.new_tokens / value for name, value in seconds.items()}


def _measures(size: Size, seconds: dict[str, float]) -> list[Measure]:
    speeds = _speeds(size, seconds)
    ours = speeds.pop(OURS)
    return [
        Measure(
            what="completions sampled, the same in every layout",
            unit=_unit(),
            ours=ours,
            peers=speeds,
            goal=">= 1x generate",
            is_met=ours >= speeds[GENERATE],
        )
    ]


def _section(options: argparse.Namespace, size: Size, seconds: dict[str, float]) -> str:
    device = f", bf16, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    rows = [
        [name, f"{speed:,.0f}", f"{seconds[name] / seconds[OURS]:.2f}"]
        for name, speed in _speeds(size, seconds).items()
    ]
    return (
        f"## Rollouts\n\n{size.describe()}{device}. Medians of {options.rounds} interleaved rounds. hfdist draws by "
        "noise of its own, which follows from a prompt's number; generate by torch's generator; both from all logits. "
        "No cache: all tokens again for each token, as context ranks do.\n\n"
        f"{describe_run('benchmarks.rollouts', 'torch', 'transformers')}\n\n"
        + markdown(["", _unit(), "x the time of hfdist"], rows)
    )


if __name__ == "__main__":
    main()
