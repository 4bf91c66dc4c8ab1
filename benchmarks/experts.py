"""LoRA of stacked experts: a step beside LoRA of attention alone, and beside PEFT's own layers.

python -m benchmarks.experts --write
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.head import Peak
from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.config.model import AdapterPart
from hfdist.models.adapter import inject_adapter
from hfdist.models.adapter_parts import aim_at_parts
from hfdist.models.expert_factors import use_factors
from hfdist.testing import run_ranks

ATTENTION, OURS, PEFT = "attention alone", "and experts, hfdist", "and experts, PEFT"
_GOAL = 1.2
_RANK = 8


class Size(NamedTuple):
    """Sizes of a mixture, and of its batch."""

    width: int
    expert_width: int
    experts: int
    blocks: int
    tokens: int


SIZE, QUICK = Size(512, 256, 32, 4, 1024), Size(64, 32, 4, 1, 64)


def main() -> None:
    """Measure all three in turns, and print or write the section."""
    options = read_options("experts", __doc__, rounds=5)
    size = QUICK if options.quick else SIZE

    def contender(name: str) -> tuple[float, float]:
        found: tuple[float, float] = run_ranks(measure, 1, name, size, group=False, timeout_seconds=600)[0]
        return found

    names = (ATTENTION, OURS, PEFT)
    figures = interleave({name: (lambda name=name: contender(name)) for name in names}, options.rounds, num_warm_up=0)
    seconds = medians({name: [pair[0] for pair in pairs] for name, pairs in figures.items()})
    peaks = medians({name: [pair[1] for pair in pairs] for name, pairs in figures.items()})
    rows = [
        [
            name,
            f"{seconds[name]:.2f}",
            f"{seconds[name] / seconds[ATTENTION]:.2f}",
            f"{peaks[name]:,.0f}",
            f"{peaks[name] / peaks[ATTENTION]:.2f}",
        ]
        for name in names
    ]
    table = markdown(["LoRA of", "CPU s a step", "x attention", "peak, MiB", "x attention"], rows)
    publish(options, "experts", f"{_preamble(size)}\n\n{table}", _measures(seconds, peaks))


def measure(name: str, size: Size) -> tuple[float, float]:
    """CPU seconds of a step (the median of three), and the most memory above that before the model was made, in MiB."""
    torch.manual_seed(0)
    with Peak(torch.device("cpu")) as peak:
        model = _make(name, size)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        ids = torch.randint(model.config.vocab_size, (1, size.tokens))
        times = []
        for _ in range(4):
            begin = time.process_time()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.process_time() - begin)
    return sorted(times[1:])[1], peak.mib


def _make(name: str, size: Size) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=size.width, moe_intermediate_size=size.expert_width, num_hidden_layers=size.blocks,
        num_attention_heads=8, num_key_value_heads=4, head_dim=size.width // 8, num_experts=size.experts,
        num_experts_per_tok=4,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    adapter = LoraConfig(r=_RANK, target_modules=[])
    experts = [] if name == ATTENTION else [AdapterPart.experts]
    aim_at_parts(model, adapter, [AdapterPart.attention, *experts])
    inject_adapter(model, adapter, "default")
    if name == OURS:
        use_factors(model)
    return model


def _preamble(size: Size) -> str:
    what = (
        f"A Qwen3-MoE, blocks: {size.blocks}, of width {size.width}, {size.experts} experts of width "
        f"{size.expert_width} of which 4 are chosen, {size.tokens:,} tokens, float32, one thread, LoRA of rank "
        f"{_RANK}. The peak is of a process, with its weights. Medians of interleaved rounds."
    )
    versions = describe_run("benchmarks.experts", "torch", "transformers", "peft")
    return f"## LoRA of experts\n\n{what}\n\n{versions}"


def _measures(seconds: dict[str, float], peaks: dict[str, float]) -> list[Measure]:
    def row(what: str, unit: str, values: dict[str, float]) -> Measure:
        ratio = values[OURS] / values[ATTENTION]
        return Measure(
            what=f"LoRA of attention and experts: {what}",
            unit=unit,
            ours=values[OURS],
            peers={"PEFT": values[PEFT]},
            limits={ATTENTION: values[ATTENTION]},
            goal=f"<= {_GOAL} x attention alone",
            is_met=ratio <= _GOAL,
        )

    return [row("CPU time of a step", "s", seconds), row("peak memory", "MiB", peaks)]


if __name__ == "__main__":
    main()
