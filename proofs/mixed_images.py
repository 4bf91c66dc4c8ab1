"""A thousand steps on rows with and without images at random over two ranks, beside one process.

`python -m proofs.mixed_images PAGE` writes the page.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from hfdist.config.run import RunConfig
from hfdist.data import TokenStream, open_corpus
from hfdist.data.marks import are_images
from hfdist.data.tokenization.image_tokens import ImageTokens
from tests.distributed.image_runs import finetune, make_config, write_rows
from tests.distributed.runs import losses, weights
from tests.image_models import make_processor, save_model
from tests.imports import import_all

STEPS, NUM_ROWS = 1000, 400
FAMILY = "llava"
"""Its tower has a block that images never reach, and its projector is apart from both other parts."""
SINGLE = "single"
LAYOUTS = {SINGLE: 1, "ddp": 2, "zero3": 2, "fsdp2": 2}
"""Ranks of each layout."""
BOUND = 1e-5
"""Of relative differences of losses, in float32."""
CONTROL_STEPS = 100
LEAST_OF_CONTROLS = 1e-4
"""What must show where a run sees other images."""
_OVERRIDES = (
    # One row a rank and step, so that whole steps have no image, or one on one rank alone.
    "data.packing=none",
    "train.global_batch_size=2",
    "data.lanes=2",
    "data.eval_fraction=0",
    "train.eval_every=null",
    # Losses stay far from 0, where a relative difference would say nothing.
    "optimizer.lr=3e-4",
)
_FIRST = (10, 100, 300, STEPS)
"""Up to which step the largest difference is shown."""


@dataclass(frozen=True)
class Course:
    """What a run has left."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def train(folder: Path, model: Path, rows: Path, layout: str, num_steps: int) -> Course:
    """Fine-tune in a layout; a rank that waits for ever ends the proof with an error."""
    own = (*_OVERRIDES, f"strategy={layout}", f"train.max_steps={num_steps}")
    run = finetune(folder, model, rows, LAYOUTS[layout], *own, timeout_seconds=3600)
    return Course(losses(run), weights(run))


def largest_difference(found: list[float], wanted: list[float]) -> float:
    """Give the largest relative difference of losses."""
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))


def count_kinds(config: RunConfig) -> Counter[tuple[bool, ...]]:
    """Count the steps by whether the row of each of two ranks has images."""
    config.data.images.used = True
    processor, corpus = make_processor(FAMILY), open_corpus(config.data)
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    images, of_ranks = ImageTokens(processor), []
    for rank in range(2):
        stream = TokenStream(corpus, tokenizer, config.data, data_rank=rank, data_size=2).read_images(images)
        stream.decodes = False
        sequences = (one for _, _, one in islice(stream.packed(0, 1), STEPS))
        of_ranks.append([any(are_images(part).any() for part in one.parts) for one in sequences])
    return Counter(zip(*of_ranks, strict=True))


def write_page(path: Path) -> None:
    """Run all layouts and the control, and write what came out as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = save_model(FAMILY, folder / "model"), write_rows(folder / "rows", num_rows=NUM_ROWS)
        kinds = count_kinds(make_config(folder / "counted", model, rows, *_OVERRIDES))
        courses = {layout: train(folder / layout, model, rows, layout, STEPS) for layout in LAYOUTS}
        others = write_rows(folder / "others", num_rows=NUM_ROWS, first_image=1)
        changed = train(folder / "control", model, others, SINGLE, CONTROL_STEPS)
    single = courses.pop(SINGLE)
    control = largest_difference(changed.losses, single.losses[:CONTROL_STEPS])
    assert control > LEAST_OF_CONTROLS, control
    path.write_text("\n".join([*_head(kinds, single, control), *_table(courses, single), ""]), encoding="utf-8")


def _table(courses: dict[str, Course], single: Course) -> list[str]:
    columns = [f"steps 1 to {stop:,}" for stop in _FIRST]
    lines = [f"| layout | {' | '.join(columns)} | weights at the end |", "|---" * (2 + len(_FIRST)) + "|"]
    for layout, course in courses.items():
        found = [largest_difference(course.losses[:stop], single.losses[:stop]) for stop in _FIRST]
        moved = max(float((course.weights[name] - value).abs().max()) for name, value in single.weights.items())
        cells = [f"{one:.1e}" + ("" if one < BOUND else f" **above {BOUND:.0e}**") for one in found]
        lines.append(f"| {layout} x2 | {' | '.join(cells)} | {moved:.1e} |")
    return lines


def _head(kinds: Counter[tuple[bool, ...]], single: Course, control: float) -> list[str]:
    one, both, none = kinds[True, False] + kinds[False, True], kinds[True, True], kinds[False, False]
    largest = max(float(value.abs().max()) for value in single.weights.values())
    return f"""\
# A thousand steps with and without images

{STEPS:,} steps of a small {FAMILY} on two gloo ranks, one row a rank and step, in float32, beside the same steps on one
process. Of these steps {both} have images on both ranks, {one} on one rank alone, and {none} on none. No rank waits for
ever: a run that did would end the proof.

Shown are the largest relative difference of losses up to a step, below {BOUND:.0e}; and the largest difference of a
weight at the end, of weights up to {largest:.1f}. The loss goes from {single.losses[0]:.3f} to {single.losses[-1]:.3f}.
Where the same rows show other images, the losses of the first {CONTROL_STEPS} steps differ by {control:.1e}, so that
such a difference would be seen.

Written by `make images` with torch {torch.__version__.partition("+")[0]}, transformers {transformers.__version__},
Python {platform.python_version()}.

```
make images
```
""".split("\n")


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    write_page(Path(sys.argv[1]))
