"""Write the table of all models of image and text: `python -m proofs.zoo_images docs/zoo-images.md`.

What is found of a type is kept in a file, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import deepspeed  # noqa: F401  # once, and not in each rank: it takes seconds
import torch
import transformers

from benchmarks.table import markdown
from hfdist.config.task import Head
from proofs.zoo_tasks import VERDICTS
from tests.zoo.images import LAYOUTS, NUM_RANKS, ROW_IMAGES, TriedImages, try_images
from tests.zoo.splitting import TOLERANCE
from tests.zoo.tasks import types_of

Found = Mapping[str, TriedImages]


def page(found: Found) -> str:
    """The whole page as Markdown; `found` has all types."""
    counts = Counter(one.verdict for one in found.values())
    return f"""\
# The zoo of models of image and text

Each type of transformers {transformers.__version__} that `AutoModelForImageTextToText` opens is tried on rows with and
without images (float32, CPU, torch {torch.__version__.partition("+")[0]}), with a small model of random weights and
the type's own processor. [How such models are trained](image-text.md) says more.

```
make zoo
```

{markdown([*VERDICTS], [[str(counts[verdict]) for verdict in VERDICTS]])}

A processor is made of parts: a small tokenizer with the special tokens that the processor's class names, and the image
processor of the type, with small sizes. A step has {", ".join(map(str, ROW_IMAGES))} images in its rows.

*Exact*: on one process the loss and the gradient of each weight are those of plain transformers on the batches of the
processor itself, up to {TOLERANCE:g}. In each layout of {NUM_RANKS} ranks they are those of one process, up to
{TOLERANCE:g}, or the layout is *refused* before it trains. Gradients are read from the saved folder: what a step of
plain gradient descent has changed. So the folder has the same tensors by the same names as that of `save_pretrained`.
*Packs*: packed rows with images are computed as each by itself. *Refused*: a run says so before it trains, and why.
*Not yet*: it could not be tried, and so nothing is said of it; of a layout, that transformers does not read the folder
into it. Each type has processes of its own, with limits.

{_table(found)}

{_reasons(found)}
"""


def _table(found: Found) -> str:
    rows = []
    for kind, one in found.items():
        if one.reason:
            continue
        layouts = [
            f"{verdict.partition(':')[0]} {one.layout_differences[name]:.0e}"
            if name in one.layout_differences
            else verdict.partition(":")[0]
            for name, verdict in ((name, one.layouts.get(name, "not tried")) for name in LAYOUTS)
        ]
        alone = [f"{one.loss_difference:.0e}", f"{one.gradient_difference:.0e}"]
        rows.append([f"`{kind}`", one.verdict, *alone, "yes" if one.packs else "no", *layouts])
    return markdown(["type", "outcome", "loss", "gradients", "packs", *LAYOUTS], rows)


def _reasons(found: Found) -> str:
    """List what is refused, what could not be tried, and where hfdist fails, by its reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, one in found.items():
        if one.reason:
            by_reason.setdefault((one.verdict, one.reason), []).append(f"`{kind}`")
        for layout, verdict in one.layouts.items():
            if verdict != "exact":
                head, _, reason = verdict.partition(": ")
                by_reason.setdefault((f"{head} in {layout}", reason), []).append(f"`{kind}`")
    lines = [f"* {verdict}: {', '.join(kinds)}: {reason}" for (verdict, reason), kinds in sorted(by_reason.items())]
    return "\n".join(lines)


def find_all(kept: Path) -> Found:
    """Try all types that the file does not have yet, and add them to it, a line each."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    found = {line.pop("type"): TriedImages(**line) for line in map(json.loads, lines)}
    for model_type in types_of(Head.tokens):
        if model_type not in found:
            tried = found[model_type] = try_images(model_type)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"type": model_type} | asdict(tried)) + "\n")
            sys.stderr.write(f"{model_type}: {tried.verdict}\n")
    return dict(sorted(found.items()))


def main(words: Sequence[str]) -> int:
    """Returns 1 if a type comes out wrong."""
    parser = argparse.ArgumentParser(prog="python -m proofs.zoo_images", description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--kept", type=Path, default=Path("build/zoo-images.jsonl"), help="what is found of each type")
    options = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options.kept.parent.mkdir(parents=True, exist_ok=True)
    found = find_all(options.kept)
    options.path.write_text(page(found), encoding="utf-8")
    return int(any(one.verdict == "wrong" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
