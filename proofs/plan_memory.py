"""Peaks of real steps beside traced ones: model families in many layouts, on gloo ranks. `make plan`.

What a rank really holds is what torch's CPU allocator was asked for, C++ parts such as DDP's buckets among it: its own
profiler reports each allocation of the real Trainer's steps. The worst rank of each is compared.

python -m proofs.plan_memory docs/plan.md [--layouts zero1,zero2 [--families llama]]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import random
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters
from typing import Any

import deepspeed  # noqa: F401  # once, and not in each rank: it takes seconds
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.models import document_attention  # noqa: F401  # a measured architecture names it, and is traced in another process
from hfdist.planning.tracing.fake_task import SHORT_DOCUMENT
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from tests.worst_rank import worst_rank

logger = logging.getLogger(__name__)

BOUND = 0.06
"""Most that a traced peak may differ from the measured one."""

_FIRST_STEP = 2
"""The first one makes the optimizer's state, and DDP sorts its buckets anew."""

_COMMON = (
    "model=tiny",
    "data.eval_sequences=16",
    "data.workers=0",
    "train.max_steps=4",
    "train.global_batch_size=8",
    "checkpoint=none",
    "report=quiet",
    "watch.heartbeat_seconds=null",
)

_SIZES = {
    "activations": ("train.micro_batch_size=4", "train.global_batch_size=8"),
    "state": ("train.micro_batch_size=1", "train.global_batch_size=4"),
    "blocks": ("train.micro_batch_size=1", "train.global_batch_size=8"),
}
"""What most of a peak is: what blocks keep, or weights, gradients and the optimizer's state. Or there are many blocks,
of which FSDP2 gathers few."""
_TOKENS = {"activations": 256, "state": 64, "blocks": 64}
"""Length of a sequence, by size."""


def _fields(width: str, inner: str, blocks: str, heads: str, **more: Any) -> dict[str, dict[str, Any]]:
    small = {width: 128, inner: 256, blocks: 4, heads: 4}
    wide = {width: 512, inner: 1024, blocks: 3, heads: 8}
    deep = small | {width: 256, inner: 512, blocks: 12}
    return {"activations": small | more, "state": wide | more, "blocks": deep | more}


_USUAL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": _fields(*_USUAL, num_key_value_heads=2),
    "qwen2": _fields(*_USUAL, num_key_value_heads=2),
    "qwen3_moe": _fields(
        "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    ),
    "gpt2": _fields("n_embd", "n_inner", "n_layer", "n_head"),
    "gpt_neox": _fields(*_USUAL),
    "gemma2": _fields(*_USUAL, num_key_value_heads=2, head_dim=32),
    "phi": _fields(*_USUAL),
    "opt": _fields("hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"),
}  # fmt: skip
"""Families, by what `model.type` calls them, and the fields of the small model of each size."""

_FOUR = ("train.micro_batch_size=4", "train.global_batch_size=16")
"""Micro batches, of which schedules hold different numbers."""

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("strategy=single",)),
    "single, bf16": (1, ("strategy=single", "train.precision=bf16")),
    "ddp": (2, ("strategy=ddp",)),
    "zero1": (2, ("strategy=zero1",)),
    "zero2": (2, ("strategy=zero2",)),
    "zero3": (2, ("strategy=zero3",)),
    "fsdp2": (2, ("strategy=fsdp2",)),
    "fsdp2 x4": (4, ("strategy=fsdp2",)),
    "fsdp2 x8": (8, ("strategy=fsdp2",)),
    "fsdp2, bf16": (2, ("strategy=fsdp2", "train.precision=bf16")),
    "gpipe": (2, ("strategy=pipeline", "strategy.pipeline=2", "strategy.schedule=gpipe", *_FOUR)),
    "1f1b": (2, ("strategy=pipeline", "strategy.pipeline=2", "strategy.schedule=1f1b", *_FOUR)),
    "zbv": (2, ("strategy=pipeline", "strategy.pipeline=2", "strategy.schedule=zbv", *_FOUR)),
}
"""Processes, and the overrides of a layout."""

RECOMPUTE = {False: (), True: ("train.gradient_checkpointing=true",)}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model in one layout."""

    family: str
    size: str
    layout: str
    recomputes: bool = False

    @property
    def processes(self) -> int:
        """Of the layout."""
        return LAYOUTS[self.layout][0]

    def config(self, folder: str) -> RunConfig:
        """Compose the run."""
        overrides = [
            *_COMMON,
            *_SIZES[self.size],
            *LAYOUTS[self.layout][1],
            *RECOMPUTE[self.recomputes],
            *_documents(Path(folder), _TOKENS[self.size]),
            f"run.dir={folder}/run",
        ]
        config = compose_config(overrides)
        # Overrides would add to the fields of another family.
        config.model.type, config.model.config = self.family, dict(FAMILIES[self.family][self.size])
        return config


def _documents(folder: Path, sequence_length: int) -> tuple[str, ...]:
    """Write documents that each leave room for a short one in a sequence, as a plan assumes; filling is that one."""
    # A token is a byte, and a document ends with one more.
    letters, length = random.Random(0), sequence_length - SHORT_DOCUMENT - 1
    rows = [json.dumps({"text": "".join(letters.choices(ascii_letters, k=length))}) for _ in range(500)]
    path = folder / "documents.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return (
        "data=files",
        f"data.sources.files.path={path}",
        "data.packing=best_fit",
        "model.tokenizer.vocab_size=257",
        f"data.sequence_length={sequence_length}",
    )


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Of the worst rank, in bytes."""

    traced: float
    measured: float

    @property
    def error(self) -> float:
        """Share by which the trace is above what was measured."""
        return self.traced / self.measured - 1


def compare(cell: Cell) -> Peaks:
    """Measure a cell on forked ranks, and trace it in another."""
    with tempfile.TemporaryDirectory() as folder:
        return compare_run(cell.config(folder), cell.processes)


def compare_run(config: RunConfig, processes: int) -> Peaks:
    """Measure a run on forked ranks, and trace it in another."""
    measured = run_ranks(measure_rank, processes, config, group=processes > 1)
    [traced] = run_ranks(_trace, 1, config, processes, measured[0][1], group=False)
    return Peaks(traced=traced, measured=max(peak for peak, _ in measured))


def _trace(config: RunConfig, processes: int, architecture: Any) -> float:
    return worst_rank(config, architecture, world_size=processes).peak.use.total


class _Profiler(TrainerCallback):
    """Asks torch's CPU allocator in each later step for the most that it had given out, in all threads.

    On busy cores a thread of gloo sometimes keeps what was sent a moment longer than the call that sent it: some steps
    then hold a block or two more, and never less, so the smallest of the steps' peaks is the peak.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._profile: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before its first micro batch."""
        if state.global_step + 1 >= _FIRST_STEP:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
            # Its tables take ten times as long as the step.
            self._profile.profiler._parse_kineto_results = lambda results: []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer's step."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            tree = self._profile.profiler.kineto_results.experimental_event_tree()
            self.peaks.append(max(_totals(tree)))
            self._profile = None


def _totals(events: Iterable[Any]) -> Iterator[int]:
    for event in events:
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation):
            yield event.extra_fields.total_allocated
        yield from _totals(event.children)


def measure_rank(config: RunConfig) -> tuple[int, Any]:
    """Train, and give the peak of a later step in bytes of this rank's allocator, and the architecture."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    run.open_folder()
    run.start_ranks()
    _count_all_threads()
    run.build_model()
    run.build_trainer()
    profiler = _Profiler()
    run.trainer.add_callback(profiler)
    run.trainer.train()
    return min(profiler.peaks), run.architecture


def _count_all_threads() -> None:
    """Let the allocator count from now on, what gloo's threads take and give back, too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
"""Between them the table stands in a page."""


_OF_BLOCKS = ("fsdp2", "fsdp2 x4", "fsdp2 x8")
"""Layouts that are looked at with many blocks, too; those of more ranks with these alone."""


def cells() -> list[Cell]:
    """All that the table shows. Recomputing changes what blocks keep, so it is not looked at where state is most."""
    every = [
        Cell(family=family, size=size, layout=layout, recomputes=recomputes)
        for layout in LAYOUTS
        for size, recomputes in (("activations", False), ("activations", True), ("state", False))
        for family in FAMILIES
    ]
    # zbv has two stages a rank, and that model three blocks.
    left_out = {("zbv", "state"), *((layout, size) for layout in _OF_BLOCKS[1:] for size in _SIZES)}
    most = [cell for cell in every if (cell.layout, cell.size) not in left_out]
    return most + [Cell(family="llama", size="blocks", layout=layout) for layout in _OF_BLOCKS]


def make_table(found: Mapping[Cell, Peaks]) -> str:
    """Give the table in Markdown: a row a family and what its peak is made of, a column a layout."""
    columns = [layout for layout in LAYOUTS if any(cell.layout == layout for cell in found)]
    rows = sorted(dict.fromkeys((cell.family, cell.size, cell.recomputes) for cell in found))
    lines = [["model", "mostly", *columns], ["---"] * 2 + ["---:"] * len(columns)]
    for family, size, recomputes in rows:
        own = [Cell(family=family, size=size, layout=layout, recomputes=recomputes) for layout in columns]
        mostly = f"{size}, recompute" if recomputes else size
        lines.append([family, mostly, *(_describe(found[cell]) if cell in found else "" for cell in own)])
    worst = max(found.values(), key=lambda peaks: abs(peaks.error))
    head = f"{len(found)} steps; the largest error is {worst.error:+.1%}. In MiB: the traced peak, and its error."
    return "\n".join([head, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _describe(peaks: Peaks) -> str:
    return f"{peaks.traced / 2**20:,.1f} ({peaks.error:+.1%})"


def read_table(page: Path) -> dict[Cell, Peaks]:
    """Give what the page's table says."""
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [[word.strip() for word in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    found = {}
    for family, mostly, *values in rows[2:]:
        size, _, recompute = mostly.partition(", ")
        for layout, value in zip(rows[0][2:], values, strict=True):
            if value:
                traced, error = (float(number.strip("(%)").replace(",", "")) for number in value.split())
                peaks = Peaks(traced=traced * 2**20, measured=traced * 2**20 / (1 + error / 100))
                found[Cell(family=family, size=size, layout=layout, recomputes=bool(recompute))] = peaks
    return found


def write_table(page: Path, found: Mapping[Cell, Peaks]) -> None:
    """Put the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{page} has no marks {BEGIN} and {END}"
    page.write_text(f"{before}{BEGIN}\n\n{make_table(found)}\n\n{END}{after}", encoding="utf-8")


def main(page: Path, layouts: Collection[str], families: Collection[str]) -> None:
    """Measure and trace, and write the table into the page; of other layouts and families it stays as it is."""
    found = read_table(page)
    for cell in cells():
        if cell.layout in layouts and cell.family in families:
            found[cell] = compare(cell)
            what = f"{cell.family} {cell.size} {cell.layout} {cell.recomputes}"
            logger.info("%s: %s", what, _describe(found[cell]))
    write_table(page, found)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS))
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    main(**vars(parser.parse_args()))
