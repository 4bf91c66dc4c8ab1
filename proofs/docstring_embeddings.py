"""Docstrings find their functions in modules that nobody trained on: before and after training, and by BM25.

python -m proofs.docstring_embeddings docs/embeddings-proof.md
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.table import markdown
from proofs.bm25 import score_all
from proofs.follow_readme import ROOT
from proofs.functions import Function, write_rows
from tests.smollm2 import write_smollm2

SEEDS = (1, 2, 3)
BLOCKS, MOST_TOKENS, STEPS = 1, 64, 30
"""Blocks of SmolLM2 that are kept, most tokens of a text, and steps of a run."""
SETTINGS = (
    "task=embed",
    "task.pooling=mean",
    f"model.config.num_hidden_layers={BLOCKS}",
    # The files hold more blocks.
    "model.allow_missing=true",
    "data=files",
    "data.sources.files.path=train.jsonl",
    "+data.eval_sources.functions.path=valid.jsonl",
    "data.eval_fraction=0",
    "data.eval_sequences=400",
    "data.sequence_length=256",
    f"data.texts.max_tokens={MOST_TOKENS}",
    "data.lanes=8",
    "data.workers=0",
    "train.epochs=null",
    f"train.max_steps={STEPS}",
    "train.global_batch_size=16",
    "train.micro_batch_size=4",
    "train.eval_every=null",
    "optimizer.lr=2e-3",
    "checkpoint=none",
    "checkpoint.keep_best=false",
    "report=quiet",
)
"""Of a run, but for its model and seed. The validation part alone was looked at while they were chosen."""
_TEXTS = 64
"""Texts that are embedded at a time."""


class Found(NamedTuple):
    """How well queries find their texts."""

    mrr: float
    """Mean of one over the place of the right text; beyond place 10 nothing."""
    recall_1: float
    """Share of queries whose right text comes first."""
    recall_10: float
    """Share of queries whose right text is among the first ten."""


def judge(scores: Sequence[Sequence[float]]) -> Found:
    """Judge scores of shape [queries, texts], of which text i belongs to query i; equal scores come before it."""
    places = [sum(score >= row[i] for score in row) for i, row in enumerate(scores)]
    return Found(
        statistics.fmean(1 / place if place <= 10 else 0.0 for place in places),
        statistics.fmean(place == 1 for place in places),
        statistics.fmean(place <= 10 for place in places),
    )


def train(folder: Path, seed: int) -> Path:
    """Train with one seed, in a folder with `model` and the rows; give the folder of what comes of it."""
    own = (f"model.name={folder / 'model'}", f"data.seed={seed}", f"run.dir=run-{seed}")
    command = [sys.executable, "-m", "hfdist", "tune", *SETTINGS, *own]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return folder / f"run-{seed}" / "model"


@torch.inference_mode()
def _embed(model: Any, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Mean of the last hidden states of each text, of length 1; shape [texts, width]."""

    def parts() -> Iterator[torch.Tensor]:
        for start in range(0, len(texts), _TEXTS):
            of_part = list(texts[start : start + _TEXTS])
            inputs = tokenizer(of_part, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
            mask = inputs["attention_mask"][..., None]
            states = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
            yield torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    return torch.cat(list(parts()))


def search(model: Any, tokenizer: Any, functions: Sequence[Function]) -> Found:
    """Judge an embedding model on functions."""
    queries, bodies = (_embed(model, tokenizer, texts) for texts in zip(*functions, strict=True))
    return judge((queries @ bodies.T).tolist())


def search_words(functions: Sequence[Function]) -> Found:
    """Judge BM25 on functions."""
    queries, bodies = zip(*functions, strict=True)
    return judge(score_all(queries, bodies))


def describe(functions: dict[str, list[Function]], rows: dict[str, Found]) -> str:
    """The page; `rows`: what was found on the held-out part, by who searched."""
    counts = {part: f"{len(found):,}" for part, found in functions.items()}
    words, trained = rows["BM25"], [found for name, found in rows.items() if name.startswith("seed ")]
    mean = statistics.fmean(found.mrr for found in trained)
    verdict = "more" if min(found.mrr for found in trained) > words.mrr else "less"
    cells = [[name, f"{one.mrr:.3f}", f"{one.recall_1:.1%}", f"{one.recall_10:.1%}"] for name, one in rows.items()]
    return f"""\
# Embeddings, measured

Docstrings of Python's standard library look for the bodies of their functions, without the docstrings, in modules that
nobody trained on. `make embeddings` writes this page.

```
make embeddings
```

{counts["train"]} functions train, {counts["valid"]} were looked at while the settings were chosen, and
{counts["held_out"]} are held out. A module or package is in one of these parts only. Each held-out docstring is
compared with all held-out bodies.

{markdown(["search by", "MRR@10", "recall@1", "recall@10"], cells)}

*Start* is SmolLM2-135M-Instruct with its token embeddings and the first {BLOCKS} of its 30 blocks, which two cores can
train in minutes; the mean of its hidden states is the embedding. The seeds are those of the order of the rows, and
train all of it by `task=embed` ([embedding models](embeddings.md)) in {STEPS} steps, about half of the rows. Their mean
MRR@10 is {mean:.3f}: {mean / rows["start"].mrr:.1f} times that of the start, and {verdict} than the {words.mrr:.3f} of
[BM25](https://doi.org/10.1561/1500000019).

BM25 compares words: docstrings and bodies share many names, and it knows from the held-out bodies themselves which of
them are rare. The small model has seen few pairs, and knows nothing of names that it has not trained on.

Python {platform.python_version()}, torch {version("torch")}, transformers {version("transformers")}; \
{os.cpu_count()} cores.
"""


def write_page(page: Path) -> bool:
    """Train, search, write the page, and tell whether each seed finds more than the start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        functions = write_rows(folder)
        start = write_smollm2(folder / "model")
        with ThreadPoolExecutor(len(SEEDS)) as pool:
            trained = dict(zip(SEEDS, pool.map(partial(train, folder), SEEDS), strict=True))
        # That of a run ends each text with the end token.
        tokenizer = AutoTokenizer.from_pretrained(trained[SEEDS[0]])
        held_out = functions["held_out"]
        rows = {"BM25": search_words(held_out)}
        rows["start"] = search(AutoModel.from_pretrained(start, num_hidden_layers=BLOCKS), tokenizer, held_out)
        for seed, path in trained.items():
            rows[f"seed {seed}"] = search(AutoModel.from_pretrained(path), tokenizer, held_out)
    page.write_text(describe(functions, rows), encoding="utf-8")
    return all(found.mrr > rows["start"].mrr for who, found in rows.items() if who.startswith("seed "))


if __name__ == "__main__":
    sys.exit(0 if write_page(Path(sys.argv[1])) else 1)
