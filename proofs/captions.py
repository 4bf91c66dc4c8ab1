"""The example of docs/image-text.md: captions of held-out images before and after training, with a picture of some.

python -m proofs.captions docs/captions-proof.md docs/images/captions.png
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.table import markdown
from proofs.follow_readme import ROOT, shown_programs
from proofs.reinforcement import Cost, run

PROGRAM = "shapes.py"
EXPERIMENT = "shapes_captions"
ONE_PROCESS = ("strategy=single", "launch.processes=1", "train.micro_batch_size=32")
GAIN = 0.5
"""By how much the share of right captions is larger at the end, at least."""
PARTS = ("colour", "form", "row", "column")
NUM_SHOWN, NUM_COLUMNS = 8, 4
"""Images of the picture, and of them in a row."""
_MAGNIFIED, _MARGIN, _LINE = 5, 12, 18
"""Of a pixel, in pixels; around an image; height of a line of text."""
_ROWS_AT_ONCE = 50


class Captioned(NamedTuple):
    """A held-out image, and what is said of it."""

    image: Path
    caption: str
    """What is right."""
    before: str
    after: str


def read_held_out(folder: Path) -> tuple[list[Path], list[list[dict[str, object]]], list[str]]:
    """Give the images, the questions as messages, and the captions of the held-out rows of a folder."""
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    images = [folder / row["images"][0] for row in rows]
    return images, [row["messages"][:1] for row in rows], [row["messages"][1]["content"][0]["text"] for row in rows]


@torch.no_grad()
def write_captions(model: Path, images: Sequence[Path], questions: Sequence[list[dict[str, object]]]) -> list[str]:
    """Let the model of a Hub folder caption images greedily, by plain transformers."""
    own = AutoModelForImageTextToText.from_pretrained(model).eval()
    processor = AutoProcessor.from_pretrained(model)
    captions: list[str] = []
    for first in range(0, len(images), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        texts = [processor.apply_chat_template(one, add_generation_prompt=True) for one in questions[some]]
        inputs = processor(
            images=[Image.open(image) for image in images[some]], text=texts, padding=True, return_tensors="pt"
        )
        written = own.generate(**inputs, max_new_tokens=16, do_sample=False)
        captions += processor.tokenizer.batch_decode(
            written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return captions


def share_right(captions: Sequence[str], expected: Sequence[str], part: int | None = None) -> float:
    """Give the share of captions that are right, or whose word number `part` of `PARTS` is."""

    def of(caption: str) -> object:
        # a red circle, top left
        return caption if part is None else caption.replace(",", "").split(" ")[1 + part : 2 + part]

    return sum(of(one) == of(other) for one, other in zip(captions, expected, strict=True)) / len(expected)


def draw_picture(shown: Sequence[Captioned]) -> Image.Image:
    """Draw images with what the model says of them, before and after."""
    font, pictures = ImageFont.load_default(size=12), [Image.open(one.image) for one in shown]
    side = _MAGNIFIED * pictures[0].width
    width, height = side + 2 * _MARGIN, side + 2 * _LINE + 2 * _MARGIN
    sheet = Image.new("RGB", (NUM_COLUMNS * width, -(-len(shown) // NUM_COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (one, picture) in enumerate(zip(shown, pictures, strict=True)):
        row, column = divmod(number, NUM_COLUMNS)
        x, y = column * width + _MARGIN, row * height + _MARGIN
        sheet.paste(picture.resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.rectangle((x, y, x + side - 1, y + side - 1), outline="#999999")
        pen.text((x, y + side + 3), f"before: {_printable(one.before)}", "#888888", font)
        colour = "#1a7f37" if one.after == one.caption else "#c62828"
        pen.text((x, y + side + 3 + _LINE), f"after: {_printable(one.after)}", colour, font)
    return sheet


def _printable(caption: str) -> str:
    """Shorten a caption of random weights, which may hold any bytes."""
    kept = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in caption)
    return kept if len(kept) <= 32 else f"{kept[:24]}..."


def describe(before: Sequence[str], after: Sequence[str], expected: Sequence[str], cost: Cost) -> str:
    """The page."""
    kinds = [("whole caption", None), *((name, part) for part, name in enumerate(PARTS))]
    rows = [[name, *(f"{share_right(said, expected, part):.1%}" for said in (before, after))] for name, part in kinds]
    return f"""\
# Captions, measured

A small model of image and text learns to name drawn shapes, from random weights:
[the example](image-text.md#an-example-that-learns) of models of image and text. The table has the share of
{len(expected)} held-out images whose caption is right, written greedily by plain transformers, from the folder that the
run began with and from the one that it exported. `make captions` writes this page and the picture.

```
make captions
```

{markdown(["right", "before", "after"], rows)}

![Held-out images with the captions of the model before and after training](images/captions.png)

The images are the first ones of the held-out rows. Green captions are right, red ones are not. The model has never seen
these images. All combinations of colour, form and place occur in training: size and place vary a little from image to
image.

The run took {cost.cpu_seconds:.0f} CPU seconds on one process. Python {platform.python_version()}, \
torch {version("torch")}, transformers {version("transformers")}.
"""


def main() -> int:
    """Run all, and write the page and the picture; 0: the model has learned."""
    page, picture = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / PROGRAM
        program.write_text(shown_programs(ROOT / "docs" / "image-text.md")[PROGRAM], encoding="utf-8")
        subprocess.run([sys.executable, program], cwd=folder, check=True)
        cost = run(folder, "finetune", f"+experiment={EXPERIMENT}", *ONE_PROCESS)
        shapes, trained = folder / "shapes", folder / "runs" / EXPERIMENT / "model"
        images, questions, expected = read_held_out(shapes)
        before, after = (write_captions(model, images, questions) for model in (shapes / "model", trained))
        shown = [Captioned(*one) for one in zip(images, expected, before, after, strict=True)]
        draw_picture(shown[:NUM_SHOWN]).save(picture, optimize=True)
    page.write_text(describe(before, after, expected, cost), encoding="utf-8")
    return 0 if share_right(after, expected) >= share_right(before, expected) + GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
