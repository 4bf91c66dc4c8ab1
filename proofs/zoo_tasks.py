"""Write the table of all masked models and encoder-decoders: `python -m proofs.zoo_tasks docs/zoo-tasks.md`.

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

import torch
import transformers

from benchmarks.table import markdown
from hfdist.config.task import Head
from hfdist.strategies.self_check import GRADIENT_BOUND
from tests.zoo.splitting import TOLERANCE
from tests.zoo.tasks import Tried, try_apart, types_of

TITLES = {
    Head.masked: "Masked models: `task=mlm`",
    Head.targets: "Encoder-decoders: `task=seq2seq`, `task=span_corruption`",
}
Found = Mapping[Head, Mapping[str, Tried]]


def page(found: Found) -> str:
    """The whole page as Markdown; `found` has all types of each head."""
    counts = [
        [title.partition(":")[0], *(str(Counter(one.verdict for one in found[head].values())[v]) for v in VERDICTS)]
        for head, title in TITLES.items()
    ]
    sections = [f"## {title}\n\n{_table(found[head])}\n{_reasons(found[head])}" for head, title in TITLES.items()]
    return f"""\
# The zoo of masked models and encoder-decoders

Each type of transformers {transformers.__version__} that has a class for a task is tried with a small model of random
weights (float32, CPU, torch {torch.__version__.partition("+")[0]}). [The zoo](zoo.md) has the causal language models.

```
make zoo
```

{markdown(["task", *VERDICTS], counts)}

*Exact*: on one process hfdist's loss and all gradients are those of the class itself, for texts of several lengths, up
to {TOLERANCE:g}. Under FSDP2 over two ranks, of which each runs two micro batches, they are those of one process;
gradients may differ by {GRADIENT_BOUND:g}. The saved folder has the bytes that `save_pretrained` writes, or
*converted* tensors as its files have them, and the class opens it again with the same loss.
*Refused*: a run says so before it trains, and why. *Not yet*: it could not be tried, because no small model can be made
of its default config, or because it reads more than texts. Each type has processes of its own, with limits.

{"".join(sections)}"""


VERDICTS = ("exact", "refused", "not yet", "wrong")


def _table(found: Mapping[str, Tried]) -> str:
    rows = [
        [
            f"`{kind}`",
            one.verdict,
            f"{one.loss_difference:.1g}",
            f"{one.gradient_difference:.1g}",
            one.sharded,
            f"{one.sharded_gradient_difference:.1g}",
            one.saved,
        ]
        for kind, one in found.items()
        if not one.reason
    ]
    return markdown(["type", "outcome", "loss", "gradients", "fsdp2", "gradients", "saved"], rows)


def _reasons(found: Mapping[str, Tried]) -> str:
    """List what is refused, what could not be tried, and where hfdist fails, by its reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for kind, one in found.items():
        if one.reason:
            by_reason.setdefault((one.verdict, one.reason), []).append(f"`{kind}`")
    lines = [f"* {verdict}: {', '.join(kinds)}: {reason}" for (verdict, reason), kinds in sorted(by_reason.items())]
    return "\n" + "".join(f"{line}\n" for line in lines) + "\n"


def find_all(kept: Path) -> Found:
    """Try all types that the file does not have yet, and add them to it, a line each."""
    found: dict[Head, dict[str, Tried]] = {head: {} for head in TITLES}
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    for line in map(json.loads, lines):
        head, model_type = Head(line.pop("head")), line.pop("type")
        found[head][model_type] = Tried(**line)
    for head in TITLES:
        for model_type in types_of(head):
            if model_type not in found[head]:
                tried = found[head][model_type] = try_apart(model_type, head)
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"head": head.value, "type": model_type} | asdict(tried)) + "\n")
                sys.stderr.write(f"{head.value}, {model_type}: {tried.verdict}\n")
    return {head: dict(sorted(of_head.items())) for head, of_head in found.items()}


def main(words: Sequence[str]) -> int:
    """Returns 1 if a type comes out wrong."""
    parser = argparse.ArgumentParser(prog="python -m proofs.zoo_tasks", description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--kept", type=Path, default=Path("build/zoo-tasks.jsonl"), help="what is found of each type")
    options = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options.kept.parent.mkdir(parents=True, exist_ok=True)
    found = find_all(options.kept)
    options.path.write_text(page(found), encoding="utf-8")
    return int(any(one.verdict == "wrong" for of_head in found.values() for one in of_head.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
