"""Plans of runs that others published, each in the layout that it had: `python -m proofs.public_runs docs/plan.md`.

A second table has what the search finds for the same models and devices: `public_search.py`.

Time and memory are those of the search's formulas, which need a few CPU seconds a model and no network. Where hfdist
lacks a part of a layout, the row names it, and what is planned is the nearest layout that there is.
Sequence parallelism in compiled blocks is the exception: formulas tell what it would give, and such a row says so.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from benchmarks.table import markdown
from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import Hardware, read_hardware
from hfdist.config.layout import Layout
from hfdist.config.run import RunConfig
from hfdist.pipeline.schedule import stages_per_rank
from hfdist.planning.planned_architecture import find_planned_architecture
from hfdist.planning.searching.constants import ModelConstants
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.search import measure
from hfdist.units import share, short, size
from proofs.plan_search import write
from proofs.public_search import GOAL, search_beside
from proofs.public_search import table as search_table

BEGIN, END = "<!-- public runs: begin -->", "<!-- public runs: end -->"
SEARCH_MARKS = "<!-- search beside public runs: begin -->", "<!-- search beside public runs: end -->"
CLOSE = 0.25
"""How far a plan may be from a published speed."""
_RUNTIME_BYTES = 1.2 * 2**30

_LLAMA_8B = ("model=llama3_8b", "data.sequence_length=8192")
_LLAMA_70B = ("model=llama3_70b", "data.sequence_length=8192")
_LLAMA_405B = (
    *_LLAMA_70B, "model.config.hidden_size=16384", "model.config.intermediate_size=53248",
    "model.config.num_hidden_layers=126", "model.config.num_attention_heads=128",
)  # fmt: skip
_QWEN = ("model=qwen3_30b_a3b", "data.sequence_length=4096", "strategy=moe")
_GPT_OSS = (
    "model=small", "model.type=gpt_oss", "data.sequence_length=4096", "model.config.hidden_size=2880",
    "model.config.intermediate_size=2880", "model.config.num_hidden_layers=24", "model.config.num_attention_heads=64",
    "model.config.num_key_value_heads=8", "+model.config.head_dim=64", "+model.config.num_local_experts=32",
    "+model.config.vocab_size=201088", "model.config.tie_word_embeddings=false",
    "model.config.max_position_embeddings=131072", "strategy=moe",
)  # fmt: skip
_DEEPSEEK = (
    "model=small", "model.type=deepseek_v3", "data.sequence_length=4096", "model.config.hidden_size=7168",
    "model.config.intermediate_size=18432", "model.config.num_hidden_layers=61",
    "model.config.num_attention_heads=128", "model.config.num_key_value_heads=128", "+model.config.vocab_size=129280",
    "model.config.max_position_embeddings=4096", "model.config.tie_word_embeddings=false", "strategy=moe",
)  # fmt: skip
_FLOPS_405B = 6 * 405e9 + 6 * 126 * 8192 * 16384
"""Of a token, attention's half that a causal mask leaves included: the page gives 430 TFLOPs a second of each GPU."""
_BF16 = ("model.dtype=bfloat16",)
_PLAIN, _BLOCKS = ("train.compile=none",), ("train.compile=blocks",)
_ALL, _CHEAP = ("train.gradient_checkpointing=true",), ("train.gradient_checkpointing=true", "train.recompute=cheap")


def _mpt(width: int, blocks: int, heads: int) -> tuple[str, ...]:
    """MPT's shapes in a class whose attention is a kernel, as their runs had it, and transformers' MPT has not."""
    fields = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": blocks}
    shape = (f"model.config.{name}={value}" for name, value in (fields | {"num_attention_heads": heads}).items())
    return ("model=gpt3_175b", "data.sequence_length=2048", "strategy=fsdp2", *_PLAIN, *shape)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run."""

    name: str
    source: str
    devices: int
    tokens_per_second: float
    """Of one device."""
    overrides: tuple[str, ...]
    global_batch_size: int
    micro_batch_size: int
    hardware: str = "h100_80gb"
    is_slow: bool = False
    """Whether its devices are `_slower`."""
    lacks: str = ""
    """What of its layout hfdist does not have; empty: nothing."""
    divides_sequences: bool = False
    """Whether its tensor ranks share the tokens between layers in compiled blocks; hfdist's do one of the two."""


TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
ASYNC = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md"
FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
MEGATRON = "https://arxiv.org/abs/2104.04473"
LLAMA = "https://arxiv.org/abs/2407.21783"
FUSED = "fused kernels of experts, and tokens sent once to each rank (DeepEP)"


def _slower(device: Hardware) -> Hardware:
    """The H100s of torchtitan's runs: by their pages 96 GB of HBM2e with 2.4 TB/s, and 500 W in place of 700."""
    return replace(device, memory_gib=95.0, memory_gb_per_second=2400.0)


RUNS = (
    Run(name="Llama 8B", source=TITAN, devices=8, tokens_per_second=5762, global_batch_size=16, micro_batch_size=2,
        is_slow=True, overrides=(*_LLAMA_8B, "strategy=fsdp2", *_CHEAP, *_PLAIN)),
    Run(name="Llama 8B, compiled", source=TITAN, devices=8, tokens_per_second=6667, global_batch_size=16,
        micro_batch_size=2, is_slow=True, overrides=(*_LLAMA_8B, "strategy=fsdp2", *_CHEAP)),
    Run(name="Llama 8B, compiled", source=TITAN, devices=128, tokens_per_second=6514, global_batch_size=256,
        micro_batch_size=2, is_slow=True, overrides=(*_LLAMA_8B, "strategy=fsdp2", *_CHEAP)),
    Run(name="Llama 8B", source=ASYNC, devices=64, tokens_per_second=4378, global_batch_size=96, micro_batch_size=12,
        is_slow=True, divides_sequences=True,
        overrides=(*_LLAMA_8B, "strategy=fsdp2", "strategy.tensor=8", *_CHEAP, *_BLOCKS)),
    Run(name="Llama 70B", source=ASYNC, devices=256, tokens_per_second=597, global_batch_size=512, micro_batch_size=16,
        is_slow=True, divides_sequences=True,
        overrides=(*_LLAMA_70B, "strategy=fsdp2", "strategy.tensor=8", *_ALL, *_BLOCKS)),
    Run(name="Llama 70B", source=AUTOMODEL, devices=64, tokens_per_second=867, global_batch_size=128,
        micro_batch_size=1, overrides=(*_LLAMA_70B, "strategy=fsdp2", "strategy.context=2", *_ALL, *_BF16)),
    Run(name="Llama 70B, LoRA", source=AUTOMODEL, devices=8, tokens_per_second=1092, global_batch_size=32,
        micro_batch_size=2, overrides=("model=llama3_70b", "data.sequence_length=4096", "strategy=fsdp2",
                                       "strategy.tensor=2", "adapter=lora", *_BF16)),
    Run(name="Llama 8B, LoRA", source=AUTOMODEL, devices=1, tokens_per_second=12473, global_batch_size=32,
        micro_batch_size=2, overrides=("model=llama3_8b", "data.sequence_length=4096", "adapter=lora", *_BF16)),
    Run(name="MPT 7B", source=FOUNDRY, devices=128, tokens_per_second=10475, global_batch_size=768, micro_batch_size=6,
        overrides=_mpt(4096, 32, 32)),
    Run(name="MPT 13B", source=FOUNDRY, devices=64, tokens_per_second=4800, global_batch_size=128, micro_batch_size=2,
        overrides=_mpt(5120, 40, 40)),
    Run(name="MPT 70B", source=FOUNDRY, devices=512, tokens_per_second=1007, global_batch_size=4096,
        micro_batch_size=8, overrides=(*_mpt(8192, 80, 64), *_ALL)),
    Run(name="GPT-3 175B", source=MEGATRON, devices=1024, hardware="a100_80gb", tokens_per_second=100,
        global_batch_size=1536, micro_batch_size=1,
        overrides=("model=gpt3_175b", "data.sequence_length=2048", "strategy=3d", "strategy.pipeline=16",
                   "strategy.tensor=8", "strategy.sharding=none", *_ALL)),
    Run(name="Llama 405B", source=LLAMA, devices=8192, tokens_per_second=430e12 / _FLOPS_405B, global_batch_size=2048,
        micro_batch_size=1, divides_sequences=True,
        overrides=(*_LLAMA_405B, "strategy=3d", "strategy.pipeline=16", "strategy.tensor=8",
                   "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=4", *_BLOCKS)),
    Run(name="Qwen3 30B-A3B", source=AUTOMODEL, devices=8, tokens_per_second=12040, global_batch_size=512,
        micro_batch_size=4, lacks=FUSED, overrides=(*_QWEN, "strategy.expert=8", *_ALL, *_BF16)),
    Run(name="Qwen3 30B-A3B", source=BRIDGE, devices=16, tokens_per_second=8901, global_batch_size=1024,
        micro_batch_size=1, lacks="fp8 with experts", overrides=(*_QWEN, "strategy.expert=16", *_BF16)),
    Run(name="GPT-OSS 20B", source=AUTOMODEL, devices=8, tokens_per_second=13058, global_batch_size=256,
        micro_batch_size=2, lacks="a kernel for attention with sinks",
        overrides=(*_GPT_OSS, "strategy.expert=8", *_BF16)),
    Run(name="DeepSeek-V3", source=AUTOMODEL, devices=256, tokens_per_second=1002, global_batch_size=512,
        micro_batch_size=1, lacks=FUSED,
        overrides=(*_DEEPSEEK, "strategy.expert=64", "strategy.pipeline=4", "strategy.schedule=interleaved_1f1b",
                   "strategy.stages_per_rank=8", *_ALL, *_BF16)),
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A published run with its plan."""

    run: Run
    plan: Candidate | None
    """None: its layout is refused."""
    tokens_per_second: float = 0.0
    """Of one device."""

    @property
    def ratio(self) -> float:
        """The planned speed, as a share of the published one."""
        return self.tokens_per_second / self.run.tokens_per_second


def command_of(run: Run) -> tuple[str, ...]:
    """The overrides that a run would have in hfdist."""
    batch = f"train.global_batch_size={run.global_batch_size}", f"train.micro_batch_size={run.micro_batch_size}"
    data = f"data.lanes={run.global_batch_size}", "data=files", "data.sources.files.path=any"
    return ("train=bf16", *run.overrides, *batch, *data, "train.max_steps=1")


def machines_of(run: Run) -> Machines:
    """Its devices; memory never refuses it."""
    hardware = read_hardware(run.hardware)
    return Machines(
        hardware=_slower(hardware) if run.is_slow else hardware, usable_bytes=inf, runtime_bytes=_RUNTIME_BYTES
    )


def constants(run: Run, config: RunConfig) -> ModelConstants:
    """What its model costs, part by part."""
    machines = machines_of(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        architecture = find_planned_architecture(config, "cuda")
        return measure(config, architecture, machines, processes=run.devices, as_asked=True)


def plan(run: Run, config: RunConfig, model: ModelConstants) -> Planned:
    """Plan a run in its own layout."""
    strategy = config.strategy
    per_rank = stages_per_rank(strategy.schedule, strategy.stages_per_rank) if strategy.pipeline > 1 else 1
    layout = replace(Layout.of(config, run.devices, per_rank), sequence=run.divides_sequences)
    found = Evaluator(config, model, machines_of(run)).evaluate(layout)
    if found is None:
        return Planned(run, None)
    tokens = run.global_batch_size * config.data.sequence_length
    return Planned(run, found, tokens / found.time.seconds / run.devices)


def table(found: Iterable[Planned]) -> str:
    """The rows of the page."""
    head = ["run", "on", "layout", "memory", "published", "planned", "of published"]
    return markdown(head, [_row(one) for one in found])


def _row(one: Planned) -> list[str]:
    run, found = one.run, one.plan
    first = [f"[{run.name}]({run.source})", f"{run.devices:,} x {run.hardware}"]
    if found is None:
        return [*first, "", "", short(run.tokens_per_second), "", run.lacks or "refused"]
    layout = found.layout
    words = f"{layout.describe().partition(': ')[2] or 'one process'}; {layout.sharding.value}"
    told = f"{one.ratio:.2f}" + (f", lacks {run.lacks}" if run.lacks else "")
    told += ", with divided sequences" if run.divides_sequences else ""
    speed = f"{short(one.tokens_per_second)}, MFU {share(found.mfu or 0)}"
    return [*first, words, size(found.memory.use.total), short(run.tokens_per_second), speed, told]


def main(page: Path) -> None:
    """Plan all, and write the tables."""
    found, searched = [], []
    for run in RUNS:
        config = compose_config(command_of(run))
        model = constants(run, config)
        found.append(one := plan(run, config, model))
        beside = search_beside(
            command_of(run),
            config,
            model,
            machines_of(run),
            devices=run.devices,
            planned=one.tokens_per_second,
            published=run.tokens_per_second,
        )
        searched.append((f"[{run.name}]({run.source})", run.devices, beside))
    told = [one for one in found if not one.run.lacks and one.plan is not None]
    close = sum(abs(one.ratio - 1) <= CLOSE for one in told)
    write(page, f"\n{close} of {len(told)} lie within {share(CLOSE)}.\n\n{table(found)}\n", BEGIN, END)
    reach = sum(beside is not None and beside.of_plan >= GOAL for _, _, beside in searched)
    words = f"{reach} of {len(searched)} reach {GOAL} of the published layout's plan."
    write(page, f"\n{words}\n\n{search_table(searched)}\n", *SEARCH_MARKS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
