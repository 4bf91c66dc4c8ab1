"""The example of docs/embeddings.md: functions found by what they do, before and after training, and by BM25.

python -m proofs.search docs/search-proof.md docs/images/search.png
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from transformers import AutoModel, AutoTokenizer

from benchmarks.table import markdown
from hfdist.records import RunFolder, read_lines
from proofs.follow_readme import ROOT, shown_programs
from proofs.reinforcement import Cost, run

PROGRAM = "library.py"
EXPERIMENT = "docstrings_search"
ONE_PROCESS = ("strategy=single", "launch.processes=1", "train.micro_batch_size=40")
MOST_TOKENS = 96
"""`data.texts.max_tokens` of the preset."""
BM25 = "BM25"
NUM_SHOWN = 8
_TEXTS_AT_ONCE = 64


class Found(NamedTuple):
    """How well a way to search finds the function of each description."""

    recall_at_1: float
    recall_at_10: float
    mrr: float
    first: list[int]
    """The function that it gives for each description."""

    @classmethod
    def of(cls, scores: torch.Tensor) -> Found:
        """Judge scores of shape [descriptions, functions]; others with the same score count as better."""
        places = (scores >= scores.diagonal()[:, None]).sum(1).float()
        shares = ((places <= most).float().mean().item() for most in (1, 10))
        return cls(*shares, (1 / places).mean().item(), scores.argmax(1).tolist())


class Outcome(NamedTuple):
    """What the training came to."""

    before: Found
    after: Found
    curve: dict[int, float]
    """The reciprocal rank that the run itself gives, by step."""
    cost: Cost


def words(text: str) -> list[str]:
    """Give what BM25 compares: letters and digits in small letters, names in their parts, `readLine` too."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.findall(r"[a-z]+|\d+", apart.lower())


def search_words(queries: Sequence[str], functions: Sequence[str]) -> Found:
    """Search by BM25, with the settings of its package."""
    import bm25s  # only `make search` installs it

    index = bm25s.BM25()
    index.index([words(one) for one in functions], show_progress=False)
    known = index.vocab_dict
    return Found.of(
        torch.stack(
            [torch.from_numpy(index.get_scores([word for word in words(one) if word in known])) for one in queries]
        )
    )


@torch.no_grad()
def embed(model: Path, texts: Sequence[str]) -> torch.Tensor:
    """Embed texts by plain transformers: the mean over a text's tokens, of length 1; shape [texts, width]."""
    own, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    parts = []
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        batch = list(texts[begin : begin + _TEXTS_AT_ONCE])
        inputs = tokenizer(batch, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        states, mask = own(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        parts.append((states * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


def search_embeddings(model: Path, queries: Sequence[str], functions: Sequence[str]) -> Found:
    """Search by the embeddings of a Hub folder."""
    return Found.of(embed(model, queries) @ embed(model, functions).T)


def learn(folder: Path, queries: Sequence[str], functions: Sequence[str]) -> Outcome:
    """Train in a folder that has the rows; the start is what a run without a gain exports."""
    common = [f"+experiment={EXPERIMENT}", *ONE_PROCESS]
    start = (*common, "train.max_steps=1", "train.eval_every=1", "optimizer.warmup_steps=0", "optimizer.lr=1e-12")
    run(folder, "tune", *start, "run.dir=start")
    cost = run(folder, "tune", *common, "run.dir=trained")
    return judge(folder, queries, functions, cost)


def judge(folder: Path, queries: Sequence[str], functions: Sequence[str], cost: Cost) -> Outcome:
    """Search with what both runs have exported."""
    before, after = (search_embeddings(folder / name / "model", queries, functions) for name in ("start", "trained"))
    lines = read_lines(RunFolder(folder / "trained").metrics)
    return Outcome(before, after, {line["step"]: line["eval_mrr"] for line in lines if "eval_mrr" in line}, cost)


def draw(outcome: Outcome, by_words: Found) -> Figure:
    """Draw the reciprocal rank of held-out descriptions over steps, beside that of BM25."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(outcome.curve), list(outcome.curve.values()), marker="o", label="the model")
    axes.axhline(by_words.mrr, color="0.3", linestyle="--", label=BM25)
    axes.set(xlabel="steps", ylabel="mean reciprocal rank", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def describe(outcome: Outcome, by_words: Found, queries: Sequence[str], functions: Sequence[str]) -> str:
    """The page."""
    named = [(BM25, by_words), ("the model, before", outcome.before), ("the model, after", outcome.after)]
    rows = [[name, f"{one.recall_at_1:.1%}", f"{one.recall_at_10:.1%}", f"{one.mrr:.3f}"] for name, one in named]
    shown = []
    for index in range(0, len(queries), len(queries) // NUM_SHOWN + 1):
        titles = [title(functions[found.first[index]]) for found in (outcome.after, by_words)]
        shown.append([f"`{text}`".replace("|", "\\|") for text in (queries[index], title(functions[index]), *titles)])
    return f"""\
# Search, measured

A small encoder learns from random weights to find a function by what its docstring says:
[the example](embeddings.md#an-example-that-learns) of embedding models. The table is of {len(queries):,} functions of
the standard library that the model has never seen; each description is to find its own among all of them. It was
computed by plain transformers, from the folders that a run exported after a step of no length, and after the training.
`make search` writes this page and the picture.

```
make search
```

{markdown(["found by", "recall@1", "recall@10", "MRR"], rows)}

![Mean reciprocal rank of held-out descriptions by step, beside BM25](images/search.png)

{BM25} compares words: those of a description with those of each whole function, with its name. Names are taken apart at
underscores and capital letters. The model reads the first {MOST_TOKENS} tokens. Some of the descriptions, and what both
find for them first:

{markdown(["description", "its function", "found by the model", f"found by {BM25}"], shown)}

The run took {outcome.cost.cpu_seconds:.0f} CPU seconds on one process, with one seed. Python \
{platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}, bm25s {version("bm25s")}.
"""


def title(function: str) -> str:
    """Give the line of a function that has its name, without what stands before it."""
    return next(line for line in function.splitlines() if line.startswith(("def ", "async def "))).rstrip(":")


def main() -> int:
    """Run all, and write the page and the picture; 0: the model beats its start and BM25."""
    page, picture = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / PROGRAM
        program.write_text(shown_programs(ROOT / "docs" / "embeddings.md")[PROGRAM], encoding="utf-8")
        subprocess.run([sys.executable, program], cwd=folder, check=True)
        lines = (folder / "library" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        queries, functions = ([row[column] for row in rows] for column in ("query", "positive"))
        by_words = search_words(queries, functions)
        outcome = learn(folder, queries, functions)
    draw(outcome, by_words).savefig(picture, dpi=100)
    page.write_text(describe(outcome, by_words, queries, functions), encoding="utf-8")
    return 0 if outcome.after.mrr > max(outcome.before.mrr, by_words.mrr) else 1


if __name__ == "__main__":
    sys.exit(main())
