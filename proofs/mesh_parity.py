"""Families of models in all layouts of the mesh beside one process. `python -m` writes the table."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from hfdist.strategies.parallel_plans import make_plans
from hfdist.verify.certificate import Row
from proofs.mesh_controls import CONTROLS, is_seen, run_control
from proofs.mesh_runs import (
    BOUNDS,
    END,
    FAMILIES,
    LAYOUTS,
    MIDDLE,
    NUM_BLOCKS,
    SINGLE,
    Outcome,
    checkpoint,
    run_layout,
)
from tests.imports import import_all
from tests.zoo.models import tiny_model


def run_grid(root: Path) -> Iterator[tuple[str, str, Outcome]]:
    """Train all families in all layouts, one process first; give family, layout and outcome."""
    for family in FAMILIES:
        # Reads the source of the classes, once for all ranks that are forked.
        make_plans(tiny_model(family, NUM_BLOCKS), tensor=2, expert=1)
    before: dict[str, Path] = {}
    for name in LAYOUTS:
        starts = {family: before.get(family) for family in LAYOUTS[name].families}
        for family, outcome in run_layout(root, name, starts).items():
            if not isinstance(outcome, str):
                before[family] = checkpoint(root / name / family, MIDDLE)
            if name != SINGLE:
                yield family, name, outcome


def write_page(path: Path) -> bool:
    """Run the grid and the controls, and write what came out as Markdown; give whether all is as it must be."""
    sections: dict[str, list[str]] = {family: [] for family in FAMILIES}
    is_right = True
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for family, layout, outcome in run_grid(root):
            is_right &= not isinstance(outcome, str) and all(row.passed for row in outcome)
            cells = [outcome] if isinstance(outcome, str) else [_cell(row) for row in outcome]
            sections[family].append(f"| {layout} | {LAYOUTS[layout].num_ranks} | {' | '.join(cells)} |")
            sys.stderr.write(f"{family} {sections[family][-1]}\n")
        controls = []
        for number, control in enumerate(CONTROLS):
            row = run_control(root, control, root / f"control-{number}")
            is_right &= is_seen(row)
            cells = [control.what, control.family, control.layout, f"{row.what}: {row.difference:.1e}"]
            controls.append(f"| {' | '.join(cells)}{'' if is_seen(row) else ' **not seen**'} |")
            sys.stderr.write(controls[-1] + "\n")
    lines = [line for family, rows in sections.items() for line in (*_section_head(family), *rows)]
    path.write_text("\n".join([*_head(), *lines, *_controls_head(), *controls, ""]), encoding="utf-8")
    return is_right


def _cell(row: Row) -> str:
    return f"{row.difference:.1e}" + ("" if row.passed else f" **above {row.bound:.0e}** in {row.worst}")


def _head() -> list[str]:
    text = f"""\
# The mesh beside one process

{len(FAMILIES)} families of models in layouts of up to 8 gloo ranks, each beside one process: tiny models of
{NUM_BLOCKS} blocks in float32, packed documents, of which very different shares are targets, several micro batches a
step, and gradients that are clipped in every step. The largest relative differences: loss and gradient norm of all
{END} steps, every parameter's gradient of the first step, every weight after the last. Then the layout goes on from the
checkpoint that the layout of the row above has saved after step {MIDDLE} (the first one: one process): *resumed* are
losses and weights of that run, beside one process that goes through. {END - MIDDLE} steps are left, and the model has
other weights before it reads those. Bounds: {BOUNDS.gradient:.0e} for gradients, {BOUNDS.loss:.0e} for all else.

*over* context: FSDP2 shards over the ranks that share sequences, too. Beside tensor ranks *auto* is ulysses for llama
and gpt2, whose heads both axes can divide, and gather for the others. transformers has no tensor plan for gpt2, so the
outputs of its layers are gathered. Written by `make mesh` with torch
{torch.__version__.partition("+")[0]}, transformers {transformers.__version__}, Python {platform.python_version()}.

```
make mesh
```"""
    return text.split("\n")


def _section_head(family: str) -> list[str]:
    columns = ["layout", "ranks", "loss", "gradient norm", "gradients", "weights", "resumed loss", "resumed weights"]
    return ["", f"## {family}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _controls_head() -> list[str]:
    text = """
## What must show

The same comparisons find each of these mistakes, with more than ten times the bound.

| mistake | family | layout | difference |
|---|---|---|---|"""
    return text.split("\n")


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    sys.exit(not write_page(Path(sys.argv[1])))
