"""Every change of layout at a checkpoint, beside one process that goes through. `python -m` writes the tables."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from hfdist.checkpoint import read_checkpoint, read_lanes, write_lanes
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.checkpoint.save_plan import OPTIMIZER_STEM, STATE_FILE
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from tests.distributed.runs import eval_losses, losses, pretrain
from tests.imports import import_all
from tests.unit.checkpoint.pieces import write_checkpoint

HALF, END = 3, 6
BOUND = 1e-6
"""Of relative differences of losses, in float32."""
LEAST_OF_CONTROLS = 1e-4
"""What must show where something was not carried over."""

COMMON = (
    # Four ranks with two stages each need eight blocks; four ranks do not divide the vocabulary and the inner width.
    "model.config.num_hidden_layers=8",
    "model.config.hidden_size=36",
    "model.config.intermediate_size=74",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "model.tokenizer.vocab_size=301",
    "data.sequence_length=32",
    "data.eval_sequences=8",
    "train.micro_batch_size=1",
    f"train.max_steps={END}",
    # Below the norm of every gradient, so that all steps are clipped.
    "train.max_grad_norm=0.5",
)


@dataclass(frozen=True)
class Layout:
    """How a run is started."""

    num_ranks: int
    overrides: tuple[str, ...]


def _interleaved() -> Layout:
    stages = ("strategy.pipeline=4", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2")
    return Layout(4, ("strategy=pipeline", *stages))


LAYOUTS = {
    "single": Layout(1, ("strategy=single",)),
    "ddp x2": Layout(2, ("strategy=ddp",)),
    "zero1 x2": Layout(2, ("strategy=zero1",)),
    "zero2 x2": Layout(2, ("strategy=zero2",)),
    "zero3 x2": Layout(2, ("strategy=zero3",)),
    "zero3 x4": Layout(4, ("strategy=zero3",)),
    "fsdp2 x2": Layout(2, ("strategy=fsdp2",)),
    "fsdp2 x4": Layout(4, ("strategy=fsdp2",)),
    "hsdp x4": Layout(4, ("strategy=hsdp",)),
    "tensor 2": Layout(2, ("strategy=tensor",)),
    "fsdp2 x2 x tensor 2": Layout(4, ("strategy=fsdp2", "strategy.tensor=2")),
    "pp2": Layout(2, ("strategy=pipeline",)),
    "pp2 x zero1 x2": Layout(4, ("strategy=pipeline_zero1",)),
    "pp4 interleaved": _interleaved(),
    "pp2 x fsdp2 x2": Layout(4, ("strategy=fsdp2", "strategy.pipeline=2")),
    "pp2 x context 2": Layout(4, ("strategy=pipeline", "strategy.context=2")),
    "pp2 x fsdp2 x2 x tensor 2": Layout(8, ("strategy=3d",)),
}
SINGLE = "single"
FURTHER = {
    SINGLE: LAYOUTS[SINGLE],
    "tensor 4": Layout(4, ("strategy=tensor", "strategy.tensor=4")),
    "context 2": Layout(2, ("strategy=single", "strategy.context=2")),
    "fsdp2 x2": LAYOUTS["fsdp2 x2"],
}
_MIXTRAL = (
    "model.type=mixtral",
    "+model.config.num_local_experts=4",
    "+model.config.output_router_logits=true",
    # transformers' kernel of experts takes rows of a multiple of 16 bytes.
    "model.config.intermediate_size=76",
)
OF_EXPERTS = {
    name: Layout(num_ranks, (*_MIXTRAL, *overrides))
    for name, num_ranks, overrides in (
        (SINGLE, 1, ("strategy=single",)),
        ("fsdp2 x2", 2, ("strategy=fsdp2",)),
        ("expert 2", 2, ("strategy=moe",)),
        ("fsdp2 x4 with expert 2", 4, ("strategy=moe",)),
        ("pp2 x expert 2", 4, ("strategy=moe", "strategy.pipeline=2")),
    )
}


@dataclass(frozen=True)
class Course:
    """What a run has measured: the losses of its steps, and the held-out loss after the last."""

    losses: tuple[float, ...]

    def second_half(self) -> Course:
        """Of a run that went through, what one that goes on from its checkpoint must repeat."""
        return Course(self.losses[HALF:])

    def difference(self, reference: Course) -> float:
        """The largest relative one."""
        return max(abs(a / b - 1) for a, b in zip(self.losses, reference.losses, strict=True))


def course_of(run_dir: Path) -> Course:
    """Read what a run has left."""
    return Course((*losses(run_dir), eval_losses(run_dir)[-1]))


def run_through(folder: Path, layout: Layout) -> Path:
    """All steps in one layout, with a checkpoint in the middle."""
    saving = ("checkpoint=default", f"checkpoint.every={HALF}")
    return pretrain(folder, layout.num_ranks, *COMMON, *layout.overrides, *saving)


def middle(run_dir: Path) -> Path:
    """The checkpoint of a run that went through."""
    return run_dir / "checkpoints" / step_name(HALF)


def go_on(folder: Path, layout: Layout, checkpoint: Path) -> Path:
    """The other steps, in a layout that may be another."""
    return pretrain(folder, layout.num_ranks, *COMMON, *layout.overrides, f"checkpoint.resume={checkpoint}")


def check_clipped(run_dir: Path) -> None:
    """Without clipping in every step the runs would not show that all ranks scale by the same norm."""
    lines = [line for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]
    assert all(line["grad_norm"] > 0.5 for line in lines)
    assert len({line["learning_rate"] for line in lines[HALF:]}) == len(lines) - HALF


# ---- what must show ----

Change = Callable[[dict[str, Piece], dict[str, Any]], None]


def forget_moments(pieces: dict[str, Piece], state: dict[str, Any]) -> None:
    """Adam's two averages start again."""
    for name, piece in pieces.items():
        if name.endswith(("/exp_avg", "/exp_avg_sq")):
            piece.view.zero_()


def forget_steps(pieces: dict[str, Piece], state: dict[str, Any]) -> None:
    """Adam corrects its averages as if they were new."""
    for name, piece in pieces.items():
        if name.endswith(f"/{STEP}"):
            piece.view.zero_()


def forget_schedule(pieces: dict[str, Piece], state: dict[str, Any]) -> None:
    """The learning rate begins anew."""
    state["schedule_steps"] = 0


CONTROLS: dict[str, Change] = {
    "no moments": forget_moments,
    "no step count": forget_steps,
    "no schedule": forget_schedule,
}


def change_checkpoint(
    checkpoint: Path, folder: Path, change: Change, add_files: Callable[[Path], None] = lambda path: None
) -> Path:
    """Write a checkpoint that verifies, and lacks something or holds more."""
    return run_ranks(_change, 1, checkpoint, folder, change, add_files, group=False)[0]


def _change(checkpoint: Path, folder: Path, change: Change, add_files: Callable[[Path], None]) -> Path:
    tensors = {f"{name}/{WEIGHT}": value for name, value in load_file(checkpoint / "model.safetensors").items()}
    for file in checkpoint.glob(f"{OPTIMIZER_STEM}-*.safetensors"):
        tensors |= load_file(file)
    for name in json.loads((checkpoint / STATE_FILE).read_text())["steps"]:
        tensors[f"{name}/{STEP}"] = torch.tensor(0.0)
    pieces = {}
    for name, value in tensors.items():
        parameter, _, key = name.rpartition("/")
        pieces[name] = Piece(name=parameter, key=key, shape=tuple(value.shape), start=0, view=value)
    state = read_checkpoint(checkpoint, pieces.values())
    change(pieces, state)

    def write_files(path: Path) -> None:
        for file in checkpoint.glob("*.json"):
            if file.name != MANIFEST:
                (path / file.name).write_bytes(file.read_bytes())
        if (lanes := read_lanes(checkpoint)) is not None:
            write_lanes(path, lanes)
        add_files(path)

    step = int(checkpoint.name.removeprefix("step-"))
    return write_checkpoint(folder, step=step, pieces=pieces.values(), state=state, write_model_files=write_files)


# ---- the document ----


def write_tables(path: Path) -> None:
    """Run all pairs of layouts and the controls, and write what came out as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [*_head(), *_describe_pairs(folder / "all", LAYOUTS)]
        lines += [
            "",
            "Four tensor ranks, which are more than there are heads; and ranks that share sequences.",
            "",
        ]
        lines += _describe_pairs(folder / "further", FURTHER)
        lines += ["", "A Mixtral of 4 experts, with the loss of its routers.", ""]
        lines += [*_describe_pairs(folder / "experts", OF_EXPERTS), *_describe_controls(folder)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _describe_pairs(folder: Path, layouts: dict[str, Layout]) -> list[str]:
    runs = {name: run_through(folder / f"through-{name}", layout) for name, layout in layouts.items()}
    whole = course_of(runs[SINGLE])
    through = {name: _cell(course_of(run).difference(whole)) for name, run in runs.items()}
    rows = [f"| (not interrupted) | {' | '.join(through.values())} |"]
    _say(rows[0])
    for source, run in runs.items():
        check_clipped(run)
        courses = [
            course_of(go_on(folder / f"{source}-{target}", layout, middle(run))) for target, layout in layouts.items()
        ]
        cells = [_cell(course.difference(whole.second_half())) for course in courses]
        rows.append(f"| {source} | {' | '.join(cells)} |")
        _say(rows[-1])
    return [f"| saved in | {' | '.join(layouts)} |", "|---" * (1 + len(layouts)) + "|", *rows]


def _describe_controls(folder: Path) -> list[str]:
    single = run_through(folder / "controls", LAYOUTS[SINGLE])
    reference = course_of(single).second_half()
    lines = [
        "",
        "Where something is left out of a checkpoint of one process, the losses must show it: more than "
        f"{LEAST_OF_CONTROLS:.0e}.",
        "",
        "| left out | difference |",
        "|---|---|",
    ]
    for name, change in CONTROLS.items():
        changed = change_checkpoint(middle(single), folder / f"changed-{name}", change)
        difference = course_of(go_on(folder / f"from-{name}", LAYOUTS[SINGLE], changed)).difference(reference)
        assert difference > LEAST_OF_CONTROLS, name
        lines.append(f"| {name} | {difference:.1e} |")
    return lines


def _cell(difference: float) -> str:
    return f"{difference:.1e}" + ("" if difference < BOUND else f" **above {BOUND:.0e}**")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _head() -> list[str]:
    text = f"""\
# Checkpoints from layout to layout

{HALF} steps in one layout, a checkpoint, and the other {END - HALF} in another, in float32 on gloo ranks: the largest
relative difference of losses, and of the held-out loss at the end, from those of one process that goes through; below
{BOUND:.0e}. A Llama of 8 blocks with tied embeddings, whose vocabulary and inner width four ranks do not divide; the
learning rate changes and the gradient is clipped in every step. Written by `make layouts` with torch
{torch.__version__.partition("+")[0]}, transformers {transformers.__version__}, Python {platform.python_version()}.

```
make layouts
```
"""
    return text.split("\n")


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    write_tables(Path(sys.argv[1]))
