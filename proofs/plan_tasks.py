"""Plans beside real runs of tasks that are not of next tokens: memory, and bytes sent. `make plan`.

One small run of each kind in each layout that takes it, on two gloo ranks. Rows are as long as a plan assumes: the
longest that may be, and some a little shorter, so that there is a mask. Memory is measured as in plan_memory.py; bytes
are those of the grade that the run gives its own plan.

python -m proofs.plan_tasks docs/plan.md [--kinds "classify;mlm"] [--layouts ddp]
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import markdown
from hfdist.config.composition.compose import compose_config
from hfdist.config.task import Head
from hfdist.records.run_folder import RunFolder
from proofs.plan_memory import LAYOUTS as ALL_LAYOUTS
from proofs.plan_memory import compare_run
from tests.distributed import pair_runs
from tests.distributed.encoder_runs import write_encoder
from tests.distributed.trl_runs import WORDS

logger = logging.getLogger(__name__)

_LENGTH = 128
_PROCESSES = 2
_MARKS = 2
"""Tokens that BERT's tokenizer adds to a text; to a pair of texts one more, and T5's one less."""
_TEXTS = f"data.texts.max_tokens={_LENGTH // 2}"
_COMMON = (
    "data=files",
    "data.eval_sequences=2",
    "data.workers=0",
    "data.lanes=4",
    f"data.sequence_length={_LENGTH}",
    "train.epochs=null",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
    "checkpoint=none",
    "report=quiet",
    "watch.heartbeat_seconds=null",
)
_DECODER = {"num_key_value_heads": 2, "head_dim": 32}
_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_T5 = {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 32}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One task with one type of model."""

    model: str
    overrides: tuple[str, ...]
    row: Callable[[int], dict[str, Any]]
    """The row of a number."""
    layouts: tuple[str, ...] = ("ddp", "zero3", "fsdp2")

    def write(self, folder: Path) -> list[str]:
        """Write the model and the rows; gives the overrides of a run."""
        rows = folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(self.row(number)) + "\n" for number in range(200)), encoding="utf-8")
        if self.model == "t5":
            pair_runs.SHAPES["t5"] = pair_runs._T5 | _T5
            pair_runs.write_model(folder / "model", "t5", num_sentinels=_LENGTH)
        else:
            head = Head.masked if "task=mlm" in self.overrides else Head.none
            more = _DECODER if self.model == "llama" else {}
            write_encoder(
                folder / "model", self.model, head=head, **_SIZES, **more, max_position_embeddings=4 * _LENGTH
            )
        places = (f"model.name={folder}/model", f"data.sources.files.path={rows}", f"run.dir={folder}/run")
        return [*_COMMON, *self.overrides, *places, "model.allow_missing=true"]


def _words(number: int, most: int) -> list[str]:
    """Give the words of a text: `most` or, of two rows in three, one or two fewer, and others in each row."""
    return [WORDS[(number + place) % len(WORDS)] for place in range(most - number % 3)]


def _text(number: int, tokens: int) -> str:
    return " ".join(_words(number, tokens - _MARKS))


def _retrieval(number: int) -> dict[str, Any]:
    return {"query": _text(number, _LENGTH // 2), "positive": _text(number + 1, _LENGTH // 2)}


def _documents(number: int) -> dict[str, Any]:
    return {"text": _text(number, _LENGTH)}


_IN_PIPELINES = ("ddp", "zero3", "fsdp2", "1f1b")
KINDS = {
    "embed, decoder": Kind(model="llama", overrides=("task=embed", _TEXTS), row=_retrieval, layouts=_IN_PIPELINES),
    "embed, encoder": Kind(model="bert", overrides=("task=embed", _TEXTS), row=_retrieval),
    "rerank": Kind(
        model="bert",
        overrides=("task=rerank",),
        row=lambda n: {
            "query": _text(3 * n, _LENGTH // 2),
            "positive": _text(n, _LENGTH // 2 + 1),
            "negative": _text(n + 1, _LENGTH // 2 + 1),
        },
    ),
    "classify": Kind(
        model="llama",
        overrides=("task=classify",),
        row=lambda n: _documents(n) | {"label": ("no", "yes")[n % 2]},
        layouts=_IN_PIPELINES,
    ),
    "token_classify": Kind(
        model="bert",
        overrides=("task=token_classify",),
        row=lambda n: {
            "tokens": _words(n, _LENGTH - _MARKS),
            "tags": [f"tag {n % 3}"] * len(_words(n, _LENGTH - _MARKS)),
        },
    ),
    "mlm": Kind(model="bert", overrides=("task=mlm", "data.too_long=split"), row=_documents),
    "seq2seq": Kind(
        model="t5",
        overrides=(
            "task=seq2seq",
            f"data.pairs.max_source_tokens={_LENGTH // 2}",
            f"data.pairs.max_target_tokens={_LENGTH // 2}",
        ),
        row=lambda n: {"source": _text(n, _LENGTH // 2 + 1), "target": _text(n + 1, _LENGTH // 2 + 1)},
    ),
    "span_corruption": Kind(model="t5", overrides=("task=span_corruption", "data.too_long=split"), row=_documents),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """Planned and measured; bytes by axis."""

    memory: tuple[float, float]
    sent: Mapping[str, tuple[float, float]]


def compare(kind: str, layout: str) -> Found:
    """Measure a run and its plan."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [*KINDS[kind].write(folder), *ALL_LAYOUTS[layout][1], "train.global_batch_size=16"]
        config = compose_config([*overrides, "train.max_steps=4"], name="tune")
        peaks = compare_run(config, _PROCESSES)
        command = [sys.executable, "-m", "hfdist", "tune", *overrides, "train.max_steps=10", "report.plan=true"]
        ended = subprocess.run(
            [*command, f"launch.processes={_PROCESSES}", f"run.dir={folder}/graded"], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        content = json.loads(RunFolder(folder / "graded").grade.read_text())
    graded = {item["name"]: (item["predicted"], item["measured"]) for item in content["items"]}
    begin = "sent along "
    return Found(
        memory=(peaks.traced, peaks.measured),
        sent={name.removeprefix(begin): pair for name, pair in graded.items() if name.startswith(begin)},
    )


def _beside(pair: tuple[float, float], unit: float, digits: int) -> str:
    planned, measured = pair
    return f"{planned / unit:.{digits}f} / {measured / unit:.{digits}f} ({planned / measured - 1:+.1%})"


def make_row(kind: str, layout: str, found: Found) -> list[str]:
    """Give the cells of a row of the table."""
    sent = ", ".join(f"{axis} {_beside(pair, 2**20, 2)}" for axis, pair in found.sent.items())
    return [kind, layout, _beside(found.memory, 2**20, 1), sent]


BEGIN, END = "<!-- tasks: begin -->", "<!-- tasks: end -->"
"""Between them the table stands in a page."""


def write_row(page: Path, row: list[str]) -> None:
    """Put a row into the table between the marks of a page, in the order of `KINDS`; the others stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    assert after, f"{page} has no marks {BEGIN} and {END}"
    lines = [line for line in table.splitlines() if line.startswith("|")]
    old = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    rows = {(kind, layout): [kind, layout, *cells] for kind, layout, *cells in [*old, row]}
    places = [(kind, layout) for kind in KINDS for layout in KINDS[kind].layouts]
    listed = [rows[place] for place in places if place in rows]
    written = markdown(["run", "layout", "memory, MiB", "sent in a step, MiB"], listed)
    page.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", encoding="utf-8")


def main(page: Path, kinds: Collection[str], layouts: Collection[str]) -> None:
    """Measure, and write each row into the page."""
    for kind in kinds:
        for layout in [layout for layout in KINDS[kind].layouts if layout in layouts]:
            row = make_row(kind, layout, compare(kind, layout))
            logger.info("%s", " | ".join(row))
            write_row(page, row)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--kinds", type=lambda text: text.split(";"), default=list(KINDS))
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(ALL_LAYOUTS))
    main(**vars(parser.parse_args()))
