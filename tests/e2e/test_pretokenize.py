"""The recipe that tokenizes a corpus, and the command that it prints: a run on tokens trains as one on the text."""

import json
import shlex

import pytest

from tests.distributed.runs import eval_losses, losses
from tests.e2e.forked import run_forked
from tests.e2e.test_command_line import ROOT
from tests.unit.data.corpora import texts

pytestmark = pytest.mark.e2e

RECIPE = ROOT / "recipes" / "pretokenize.py"
SMALL = ("model=tiny", "model.tokenizer.vocab_size=300", "data.sequence_length=64", "data.lanes=12",
         "data.eval_sequences=4", "train.max_steps=3", "train.global_batch_size=4", "train.micro_batch_size=2",
         "optimizer.warmup_steps=0", "checkpoint=none", "report=quiet")  # fmt: skip


def test_a_run_on_tokens_trains_as_one_on_the_text(tmp_path):
    data = tmp_path / "my texts"
    data.mkdir()
    rows = [json.dumps({"text": text}) for text in texts()]
    (data / "one.jsonl").write_text("\n".join(rows[:50]) + "\n")
    (data / "two.jsonl").write_text("\n".join(rows[50:70]) + "\nno JSON\n" + "\n".join(rows[70:]) + "\n")
    corpus = ["data=files", f"data.sources.files.path='{data}'", "data.on_bad_rows=skip"]
    cache = {"HFDIST_CACHE": str(tmp_path / "cache")}

    made = run_forked(*SMALL, *corpus, "run.name=made", cwd=tmp_path, script=RECIPE, **cache)
    assert made.returncode == 0, made.stderr
    assert f"{len(rows) + 1} documents" in made.stderr
    assert "files:two.jsonl: 1 unreadable, now empty documents: rows 20" in made.stderr
    (command,) = [line for line in made.stderr.splitlines() if "hfdist pretrain model=" in line]
    overrides = shlex.split(command.partition("model=... ")[2])

    text = run_forked(*SMALL, *corpus, "run.name=text", cwd=tmp_path, **cache)
    assert text.returncode == 0, text.stderr
    tokens = run_forked(*SMALL, *overrides, "run.name=tokens", cwd=tmp_path, **cache)
    assert tokens.returncode == 0, tokens.stderr
    ours, reference = (tmp_path / "runs" / name for name in ("tokens", "text"))
    assert len(losses(ours)) == 3
    assert losses(ours) == losses(reference)
    assert eval_losses(ours) == eval_losses(reference)
