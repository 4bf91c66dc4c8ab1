"""What one GPU shows: layouts beside a CPU and one another, and plans beside what runs of a 1B model measure.

python -m proofs.gpu docs/gpu.md [equal | tasks | sizes] [minutes]

Each layout has one rank: its own code runs on the GPU, with NCCL where it has a process group. That several ranks train
as one does is tested over gloo.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.table import describe_run, last_said, markdown, write_section
from hfdist.config.train import Precision
from hfdist.records import RunFolder, read_lines
from hfdist.verify.certificate import BOUNDS, Bounds, Row
from hfdist.verify.compare_runs import compare_runs

ROOT = Path(__file__).resolve().parents[1]
SECONDS_OF_ONE = 240
AT_ONCE = 8
NUM_STEPS, STOPPED_STEP = 5, 3

SMALL = (
    "model=tiny", f"train.max_steps={NUM_STEPS}", "checkpoint.every=1", f"checkpoint.keep={NUM_STEPS}", "report=quiet",
    "optimizer.eps=1e-4", "data.eval_sequences=8",
)  # fmt: skip
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
CPU, CPU_BF16 = "a CPU", "a CPU, bf16"
GPU, GPU_BF16 = "single", "single, bf16"


class Case(NamedTuple):
    """A run, and the run that it must equal."""

    beside: str
    overrides: tuple[str, ...] = ()
    bounds: Bounds = BOUNDS[Precision.fp32]
    on_cpu: bool = False
    goes_on_from: str | None = None
    """Begins at the middle checkpoint of this run."""
    recipe: str = "pretrain"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _one_rank(strategy: str, *overrides: str) -> tuple[str, ...]:
    return (f"strategy={strategy}", "strategy.min_data=1", *overrides)


CHECKPOINTED = "train.gradient_checkpointing=true"
BF16 = BOUNDS[Precision.bf16]
EQUAL = {
    GPU: Case(CPU, ("train.compile=none",)),
    "single, compiled blocks": Case(GPU),
    "single, activation checkpointing": Case(GPU, (CHECKPOINTED,)),
    "single, activation offload": Case(GPU, (CHECKPOINTED, "train.activation_offload=true")),
    "single, recompute=cheap": Case(GPU, (CHECKPOINTED, "train.recompute=cheap")),
    "single, flex_attention": Case(GPU, ("model.attention=flex_attention",)),
    "ddp": Case(GPU, _one_rank("ddp")),
    "zero1": Case(GPU, _one_rank("zero1")),
    "zero2": Case(GPU, _one_rank("zero2")),
    "zero3": Case(GPU, _one_rank("zero3")),
    "zero3_offload": Case(GPU, ("strategy=zero3_offload",)),
    "fsdp2": Case(GPU, _one_rank("fsdp2")),
    GPU_BF16: Case(CPU_BF16, ("train.precision=bf16",), BF16),
    "fsdp2, bf16": Case(GPU_BF16, _one_rank("fsdp2", "train.precision=bf16"), BF16),
    "zero2, bf16": Case(GPU_BF16, _one_rank("zero2", "train.precision=bf16"), BF16),
    "single, fp16": Case(CPU, ("train.precision=fp16",), BF16),
    "single, fp8": Case("a CPU, fp8", ("train.precision=fp8",), BF16),
    "a CPU goes on from single": Case(CPU, on_cpu=True, goes_on_from=GPU),
    "single goes on from itself": Case(GPU, ("train.compile=none",), goes_on_from=GPU),
    "fsdp2 goes on from zero3": Case(GPU, _one_rank("fsdp2"), goes_on_from="zero3"),
    "zero2 goes on from a CPU": Case(CPU, _one_rank("zero2"), goes_on_from=CPU),
}
REFERENCES = {
    CPU: Case(CPU, on_cpu=True),
    CPU_BF16: Case(CPU_BF16, ("train.precision=bf16",), on_cpu=True),
    "a CPU, fp8": Case("a CPU, fp8", ("train.precision=fp8",), on_cpu=True),
}
PACKAGES = {"fp8": "torchao", "qlora": "bitsandbytes"}

OF_TUNING = (
    "checkpoint=default", "data.sequence_length=64", "data.lanes=4", "train.epochs=null", "train.global_batch_size=4",
    "train.micro_batch_size=2", "data.eval_fraction=0.1",
)  # fmt: skip
ROWS = {
    "pairs": {"prompt": "{n} is ", "chosen": "a number", "rejected": "a word"},
    "marked": {"prompt": "{n} is ", "completion": "a number", "label": True},
    "prompts": {"prompt": "{n} + 1 = "},
}
SCORER = "reward, a CPU"
REWARDED = (
    "data.format=prompt", "task.rewards={reward_model: 1.0}", f"task.reward_model=runs/{_slug(SCORER)}/model",
    "task.num_generations=2", "task.max_new_tokens=8", "task.beta=0.1",
)  # fmt: skip


def _tuned(task: str, rows: str, beside: str, *overrides: str, on_cpu: bool = False) -> Case:
    overrides = (f"task={task}", f"data={rows}.jsonl", *OF_TUNING, *overrides)
    return Case(beside, overrides, on_cpu=on_cpu, recipe="tune")


def _rewarded(*overrides: str, on_cpu: bool = False) -> Case:
    # Advantages sum to 0, and so does almost the loss: a difference beside it is large.
    bounds = BOUNDS[Precision.fp32]._replace(loss=1e-3)
    return _tuned("grpo", "prompts", "grpo, a CPU", *REWARDED, *overrides, on_cpu=on_cpu)._replace(bounds=bounds)


def _adapted(beside: str, on_cpu: bool = False) -> Case:
    of_texts = ("data=prompts.jsonl", "data.format=text", "data.sources.files.text=prompt")
    overrides = ("adapter=qlora", "adapter.merge=false", *of_texts, *OF_TUNING)
    return Case(beside, overrides, on_cpu=on_cpu, recipe="finetune")


OF_CPU = {
    SCORER: _tuned("reward", "pairs", SCORER, on_cpu=True),
    "dpo, a CPU": _tuned("dpo", "pairs", "dpo, a CPU", on_cpu=True),
    "kto, a CPU": _tuned("kto", "marked", "kto, a CPU", on_cpu=True),
    "qlora, a CPU": _adapted("qlora, a CPU", on_cpu=True),
}
TASKS = {
    "dpo": _tuned("dpo", "pairs", "dpo, a CPU"),
    "dpo, zero3": _tuned("dpo", "pairs", "dpo, a CPU", *_one_rank("zero3")),
    "kto, zero2": _tuned("kto", "marked", "kto, a CPU", *_one_rank("zero2")),
    "reward, fsdp2": _tuned("reward", "pairs", SCORER, *_one_rank("fsdp2")),
    "qlora": _adapted("qlora, a CPU"),
    "grpo, a CPU": _rewarded(on_cpu=True),
    "grpo": _rewarded(),
    "grpo, fsdp2": _rewarded(*_one_rank("fsdp2")),
    "grpo, zero3": _rewarded(*_one_rank("zero3")),
    "grpo, a generator": _rewarded("task.generators=1", "task.max_staleness=0"),
}

LARGE = (
    "model=small", "model.config.hidden_size=2048", "model.config.intermediate_size=8192",
    "model.config.num_hidden_layers=16", "model.config.num_attention_heads=32", "model.config.num_key_value_heads=8",
    "model.config.max_position_embeddings=4096", "model.config.vocab_size=128256", "model.tokenizer.vocab_size=1024",
    "model.tokenizer.train_bytes=1000000", "data.sequence_length=4096", "data.eval_sequences=4",
    "train.global_batch_size=4", "train.micro_batch_size=4", "train.max_steps=16", "checkpoint=none",
    "train.precision=bf16",
)  # fmt: skip
SIZES = {
    "single": (),
    "single, flex_attention": ("model.attention=flex_attention",),
    "single, a save": ("checkpoint=default", "checkpoint.every=8", "checkpoint.keep=1", "train.max_steps=12"),
    "single, activation checkpointing": (CHECKPOINTED,),
    "fsdp2": _one_rank("fsdp2"),
    "zero2": _one_rank("zero2"),
    "single, fp8": ("train.precision=fp8",),
    "single, compile=none": ("train.compile=none",),
    "zero3_offload": ("strategy=zero3_offload",),
}


def main(page: Path, which: str = "", minutes: str = "10") -> bool:
    """Run what there is time for, and write the tables; give whether no run has failed, and all are equal that must."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is at hand")
    end, failed = time.monotonic() + 60 * float(minutes), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("HFDIST_CACHE", str(folder / "cache"))
        for part, write in (("equal", write_equal), ("tasks", write_tasks), ("sizes", write_sizes)):
            if which in ("", part):
                text, missed = write(folder, end)
                write_section(page, part, text)
                failed += missed
    sys.stdout.write(f"failed or not equal: {failed or 'none'}\n")
    return not failed


def write_equal(folder: Path, end: float) -> tuple[str, list[str]]:
    """All of EQUAL beside what they must equal; give also those that do not."""
    said = run_all(folder, REFERENCES, end)
    first = {name: case for name, case in EQUAL.items() if case.goes_on_from is None}
    said |= run_all(folder, first, end)
    said |= run_all(folder, {name: case for name, case in EQUAL.items() if name not in first}, end)
    return _compare_all(folder, EQUAL, said)


def write_tasks(folder: Path, end: float) -> tuple[str, list[str]]:
    """All of TASKS beside what they must equal; give also those that do not."""
    for name, row in ROWS.items():
        rows = ({key: v.format(n=n) if isinstance(v, str) else v for key, v in row.items()} for n in range(200))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run_all(folder, OF_CPU, end)
    said |= run_all(folder, TASKS, end)
    return _compare_all(folder, {name: case for name, case in TASKS.items() if name != case.beside}, said)


def _compare_all(folder: Path, cases: dict[str, Case], said: dict[str, str | None]) -> tuple[str, list[str]]:
    lines, failed = [], []
    for name, case in cases.items():
        why = said[name] or said[case.beside]
        rows: tuple[Row, ...] = (
            () if why else compare_runs(run_folder(folder, name), run_folder(folder, case.beside), case.bounds)
        )
        found = {row.what: row for row in rows}
        cells = [_cell(found.get(what)) for what in COLUMNS]
        lines.append([name, case.beside, *cells, why or ""])
        failed += [] if rows and all(row.passed for row in rows) else [name]
    text = (
        f"{describe_run('proofs.gpu', 'torch', 'transformers', 'deepspeed')}, {torch.cuda.get_device_name()}. "
        f"{len(cases) - len(failed)} of {len(cases)} are within the bounds of `hfdist prove`.\n\n"
        + markdown(["run", "beside", *COLUMNS, "what was said"], lines)
    )
    return text, failed


COLUMNS = ("loss", "gradient norm", "gradients of step 1", "weights at the end")


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row.difference:.1e}" if row.passed else f"**{row.difference:.1e}** (bound {row.bound:.0e}, {row.worst})"


def run_all(folder: Path, cases: dict[str, Case], end: float) -> dict[str, str | None]:
    """Run several at once, and give what each that has failed said."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(cases, pool.map(lambda name: _run_case(folder, name, cases[name], end), cases), strict=True))


def _run_case(folder: Path, name: str, case: Case, end: float) -> str | None:
    missing = [package for word, package in PACKAGES.items() if word in name and find_spec(package) is None]
    if missing:
        return f"{missing[0]} is not installed"
    if case.goes_on_from is not None:
        with suppress(FileNotFoundError):
            _copy_first_half(run_folder(folder, case.goes_on_from), run_folder(folder, name))
    end = min(end, time.monotonic() + SECONDS_OF_ONE)
    return run(folder, name, (*SMALL, *case.overrides), end, case.recipe, **(NO_GPU if case.on_cpu else {}))


def _copy_first_half(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if path.is_dir() and path.name > f"step-{STOPPED_STEP:08d}":
            shutil.rmtree(path)
    shutil.rmtree(target / "model", ignore_errors=True)


def run_folder(folder: Path, name: str) -> Path:
    """Where `run` leaves the run of this name."""
    return folder / "runs" / _slug(name)


def run(
    folder: Path, name: str, overrides: tuple[str, ...], end: float, recipe: str = "pretrain",
    program: tuple[str, ...] = ("hfdist",), **environment: str,
) -> str | None:  # fmt: skip
    """Run a recipe to its end; None: it went well, else what it said last."""
    seconds = end - time.monotonic()
    if seconds < 1:
        return "no time was left"
    command = [sys.executable, "-m", *program, recipe, *overrides, f"run.name={_slug(name)}"]
    log = folder / f"{_slug(name)}.log"
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command, cwd=folder, env=os.environ | {"PYTHONPATH": paths} | environment, stdout=out, stderr=out,
                timeout=seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"not done after {seconds:.0f} s"
    sys.stderr.write(f"===== {name}: {code}\n{log.read_text()}\n")
    return None if code == 0 else f"{code}: {last_said(log.read_text())}"[:200]


def write_sizes(folder: Path, end: float) -> tuple[str, list[str]]:
    """Runs of the large model one after the other, beside the plan of each; give also those that have failed."""
    lines = [[name, *_measure(folder, name, overrides, end)] for name, overrides in SIZES.items()]
    header = ["run", "peak GiB", "step ms", "tokens/s", "Wh", "MFU", "what was said"]
    machine = f"{describe_run('proofs.gpu', 'torch', 'transformers', 'deepspeed')}, {torch.cuda.get_device_name()}.\n\n"
    return machine + markdown(header, lines), [line[0] for line in lines if line[-1]]


def _measure(folder: Path, name: str, overrides: tuple[str, ...], end: float) -> list[str]:
    end = min(end, time.monotonic() + SECONDS_OF_ONE)
    why = run(folder, f"large {name}", (*LARGE, *overrides), end)
    run_dir = run_folder(folder, f"large {name}")
    try:
        items = {item["name"]: item for item in json.loads((run_dir / "grade.json").read_text())["items"]}
        last = read_lines(RunFolder(run_dir).metrics)[-2]
    except (OSError, ValueError, LookupError):
        return ["-"] * len(FIGURES) + ["-", why or "no records"]
    cells = [
        f"{items[what]['measured'] / unit:,.3g} ({items[what]['error']:+.1%})" if what in items else "-"
        for what, unit in FIGURES.items()
    ]
    return [*cells, f"{last.get('mfu', 0):.1%}", why or ""]


FIGURES = {"peak memory": 2**30, "step": 1e-3, "speed": 1, "energy": 1e-3}


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), *sys.argv[2:]))
