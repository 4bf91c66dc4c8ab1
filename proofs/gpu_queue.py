"""Lines for a GPU that is at hand for minutes: the most valuable first, each noted as it ends, and gone on with later.

python -m proofs.gpu_queue [--minutes 12] [--results FOLDER] [--quick]

Each line is a run in a process of its own, with a limit of its own. What a line has given on a card stands in
`gpu_lines.jsonl` of the results' folder, and the table of the page is made of that file after each line. The same
command goes on with the lines that have no figure for this card: first those that were never begun, then those that
have failed. `--quick` runs each in the smallest size, on a CPU too: it shows that a line's program runs at all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu import run_one as run_contender
from benchmarks.gpu_contender import QUICK as QUICK_SHAPE
from benchmarks.gpu_contender import SIZES
from benchmarks.table import MEASURED, markdown, write_section
from hfdist.config.train import Precision
from hfdist.records import RunFolder, read_lines
from hfdist.records.lines import append_line
from hfdist.verify.certificate import BOUNDS
from hfdist.verify.compare_runs import compare_runs
from proofs.gpu import LARGE, OF_TUNING, ROOT, SMALL, run, run_folder

NAME, PAGE = "gpu_lines.jsonl", "gpu.md"
LEAST_SECONDS = 30.0
"""Under which no line is begun: so long a bare machine imports."""
Figures = Mapping[str, float]


class Outcome(NamedTuple):
    """Figures, or the reason why there are none."""

    figures: Figures
    reason: str


class Place(NamedTuple):
    """Where and until when a line is measured."""

    folder: Path
    until: float
    is_quick: bool


class Line(NamedTuple):
    """A run and what it shows."""

    name: str
    seconds: float
    """Its limit."""
    overrides: tuple[str, ...]
    recipe: str = "pretrain"
    measure: Callable[[Line, Place], Outcome] | None = None
    """None: speed, and memory beside the plan."""


def _beside_one_rank(line: Line, place: Place) -> Outcome:
    """Two ranks on this GPU beside one: the largest relative differences."""
    one, overrides = "one rank", (*SMALL, "train.compile=none")
    why = None
    if not run_folder(place.folder, one).exists():
        why = run(place.folder, one, overrides, place.until)
    ranks = ("torch.distributed.run", "--nproc-per-node=2", "-m", "proofs.gpu_ranks")
    why = why or run(place.folder, line.name, (*overrides, *line.overrides), place.until, program=ranks)
    if why is not None:
        return Outcome({}, why)
    rows = compare_runs(run_folder(place.folder, line.name), run_folder(place.folder, one), BOUNDS[Precision.fp32])
    wrong = [f"{row.what} {row.difference:.1e} ({row.worst})" for row in rows if not row.passed]
    if wrong:
        return Outcome({}, f"not equal: {', '.join(wrong)}")
    return Outcome({row.what: row.difference for row in rows}, "")


def _contend(line: Line, place: Place) -> Outcome:
    """A contender of benchmarks.gpu, by the line's name."""
    found = run_contender(line.name, QUICK_SHAPE if place.is_quick else SIZES, place.until)
    if isinstance(found, str):
        return Outcome({}, found)
    return Outcome({"tokens/s": found["tokens_per_second"], "peak GiB": found["peak_bytes"] / 2**30}, "")


_TEXTS = ("data=texts.jsonl", "data.sources.files.text=text", "data.format=text")
_8B = (
    *LARGE, *OF_TUNING, *_TEXTS, "model.config.hidden_size=4096", "model.config.intermediate_size=14336",
    "model.config.num_hidden_layers=32", "data.sequence_length=2048", "train.max_steps=8", "checkpoint=none",
    "train.micro_batch_size=1", "train.gradient_checkpointing=true", "adapter.merge=false",
)  # fmt: skip
_MOE = (
    *LARGE, "model.type=qwen3_moe", "model.config.moe_intermediate_size=1024", "model.config.num_experts=16",
    "model.config.num_experts_per_tok=2",
)  # fmt: skip
_ROLLOUTS = (
    *LARGE, *OF_TUNING, "task=grpo", "data=prompts.jsonl", "data.format=prompt_completion", "task.num_generations=8",
    "task.rewards={arithmetic: 1.0}", "task.max_new_tokens=256", "task.beta=0", "train.global_batch_size=32",
    "train.micro_batch_size=32", "train.max_steps=4", "checkpoint=none",
)  # fmt: skip
_PACKED = (*LARGE, *_TEXTS, "data.packing=best_fit")
QUICK = (
    "model.config.hidden_size=64", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2", "model.config.vocab_size=1024",
    "data.sequence_length=128", "train.max_steps=4", "train.precision=fp32", "data.eval_sequences=2",
    "train.micro_batch_size=1", "model.tokenizer.vocab_size=300", "model.tokenizer.train_bytes=20000",
)  # fmt: skip
QUICK_ROLLOUTS = ("task.max_new_tokens=8", "train.global_batch_size=4")
LINES = (
    Line("packed documents, sdpa", 120, (*_PACKED, "model.attention=sdpa")),
    # Beside the line `hfdist`, whose sequences are one document each.
    Line("packed documents, varlen", 150, (*_PACKED, "model.attention=varlen")),
    Line("packed documents, flex_attention", 150, (*_PACKED, "model.attention=flex_attention")),
    Line("packed documents, flash_attention_2 of the package kernels", 150,
         (*_PACKED, "model.attention=flash_attention_2")),
    *(Line(f"two ranks on one GPU, {strategy}", 150, (f"strategy={strategy}",), measure=_beside_one_rank)
      for strategy in ("pipeline", "fsdp2", "tensor", "long_context", "zero3", "zero2", "zero1", "ddp")),
    Line("rollouts of a 1B model", 200, _ROLLOUTS, "tune"),
    Line("LoRA of an 8B shape", 200, (*_8B, "adapter=lora"), "finetune"),
    Line("QLoRA of an 8B shape", 200, (*_8B, "adapter=qlora"), "finetune"),
    Line("a mixture of 16 experts", 150, _MOE),
    Line("memory beside the plan, activation checkpointing", 120, (*LARGE, "train.gradient_checkpointing=true")),
    Line("memory beside the plan, activation offload", 120,
         (*LARGE, "train.gradient_checkpointing=true", "train.activation_offload=true")),
    # A plan knows no evaluation: where that holds more than a step, the ratio is under 1.
    Line("memory beside the plan, evaluation without logits", 120, (*LARGE, "train.eval_every=4")),
    *(Line(name, 150, (), measure=_contend) for name in ("HF Trainer", "HF Trainer, liger", "hfdist")),
)  # fmt: skip
"""The most valuable first. A later one has its place here, and nowhere else."""


def due(lines: Sequence[Line], path: Path, card: str) -> list[Line]:
    """Give the lines without a figure for this card, those that were never begun first, each in the given order."""
    tried = {str(one.get("line")): bool(one.get("figures")) for one in read_lines(path) if one.get("card") == card}
    return [line for line in lines if line.name not in tried] + [
        line for line in lines if tried.get(line.name) is False
    ]


def work(
    lines: Sequence[Line], path: Path, card: str, end: float, measure: Callable[[Line, float], Outcome],
    written: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Run what there is time for; give the number of lines that are left without a figure.

    Args:
        lines: the most valuable first.
        path: the file of what was measured; a line of it is added as each run ends.
        card: the device's name.
        end: of the time, by `time.monotonic`.
        measure: runs a line until a time at most.
        written: called after each line.
    """
    for line in due(lines, path, card):
        begin = time.monotonic()
        if end - begin < min(LEAST_SECONDS, line.seconds):
            break
        try:
            figures, reason = measure(line, min(end, begin + line.seconds))
        except Exception as error:  # the next line may well run
            figures, reason = {}, f"{type(error).__name__}: {error}"[:200]
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        seconds = round(time.monotonic() - begin, 1)
        said = {"figures": dict(figures)} if figures else {"reason": reason or "it gave no figures"}
        append_line(path, {"line": line.name, "card": card, "date": date, "seconds": seconds, **said})
        written()
    return len(due(lines, path, card))


def table(lines: Sequence[Line], path: Path) -> str:
    """All lines with their newest figures, on whatever card; without one: why, or `not measured`."""
    found = read_lines(path)
    rows = []
    for line in lines:
        own = [one for one in found if one.get("line") == line.name]
        newest = next((one for one in reversed(own) if one.get("figures")), own[-1] if own else None)
        if newest is None:
            rows.append([line.name, "not measured", "-", "-"])
        else:
            figures = newest.get("figures") or {}
            said = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items()) or f"failed: {newest['reason']}"
            rows.append([line.name, said.replace("|", "/"), str(newest["card"]), str(newest["date"])])
    return markdown(["line", "figures", "card", "on"], rows)


def main(arguments: Sequence[str]) -> None:
    """Run the queue, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m proofs.gpu_queue", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0, help="no line is begun or goes on afterwards")
    parser.add_argument("--results", type=Path, help="a folder for figures and table, else the project's")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, also on a CPU, into --results alone")
    parser.add_argument("--only", nargs="+", default=[], help="lines whose names begin so")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.quick:
        sys.exit("no CUDA device is at hand: --quick shows that the lines run")
    if options.quick and options.results is None:
        sys.exit("--quick gives no figures of a GPU: --results FOLDER takes them")
    end = time.monotonic() + 60 * options.minutes
    folder = options.results or MEASURED
    page = ROOT / "docs" / PAGE if options.results is None else folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    path, card = folder / NAME, torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    # A small machine may be slow.
    limited = [line._replace(seconds=900) for line in LINES] if options.quick else LINES
    lines = [line for line in limited if not options.only or line.name.startswith(tuple(options.only))]
    with tempfile.TemporaryDirectory() as runs:
        texts = (
            {"text": f"document {n}: {'some words and numbers ' * (1 + n % 40)}{n}"}
            for n in range(400 if options.quick else 20_000)
        )
        (Path(runs) / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        prompts = ({"prompt": f"{n} + 1 = ", "completion": str(n + 1)} for n in range(1000))
        (Path(runs) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

        def measure(line: Line, until: float) -> Outcome:
            return (line.measure or _measure)(line, Place(Path(runs), until, options.quick))

        left = work(lines, path, card, end, measure, lambda: write_section(page, "lines", table(LINES, path)))
    sys.stdout.write(f"{table(LINES, path)}\n{left} of {len(lines)} lines have no figure for {card}\n")


def _measure(line: Line, place: Place) -> Outcome:
    """Run a line, and read what its records say of speed and of the memory beside the plan."""
    quick = (*QUICK, *(QUICK_ROLLOUTS if line.recipe == "tune" else ()))
    overrides = (*line.overrides, *(quick if place.is_quick else ()))
    why = run(place.folder, line.name, overrides, place.until, line.recipe)
    run_dir = run_folder(place.folder, line.name)
    if why is not None:
        return Outcome({}, why)
    items = {item["name"]: item for item in json.loads((run_dir / "grade.json").read_text())["items"]}
    measured = [one for one in read_lines(RunFolder(run_dir).metrics) if "tokens_per_second" in one]
    figures = {"tokens/s": float(measured[-1]["tokens_per_second"])} if measured else {}
    for name, key in {"MFU": "mfu", "MFU of documents": "mfu_documents"}.items():
        figures |= {name: float(measured[-1][key])} if measured and key in measured[-1] else {}
    for name, (item, unit) in {"peak GiB": ("peak memory", 2**30), "step ms": ("step", 1e-3)}.items():
        if item in items:
            figures |= {name: items[item]["measured"] / unit, f"{name} against the plan": 1 + items[item]["error"]}
    return Outcome(figures, "")


if __name__ == "__main__":
    main(sys.argv[1:])
