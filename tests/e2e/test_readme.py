"""The commands that README shows, in its order and in one folder, in small: each finds what those before it have left.

`follow_readme.py` does the same in a fresh clone and environment.
"""

import shlex
import subprocess

import pytest

from hfdist import __main__ as command
from hfdist import launch
from tests.e2e.follow_readme import script_for, shown_commands
from tests.e2e.forked import run_forked
from tests.unit.config.shipped import CONF

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

README = CONF.parent / "README.md"
SMALL = ("train.max_steps=12", "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_every=null",
         "data.sequence_length=32", "data.eval_sequences=4", "data.workers=0", "report=quiet", "checkpoint.every=6",
         "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
         "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1",
         "model.tokenizer.vocab_size=300", "model.tokenizer.train_bytes=100000")  # fmt: skip


def test_the_script_for_a_clone_reads_as_readme_does(tmp_path):
    script = script_for(README, tmp_path / "texts.jsonl", ["train.max_steps=12"])
    said = subprocess.run(
        ["bash", "-euc", "\n".join(line for line in script.splitlines() if line.startswith("echo "))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == script.splitlines()[1::2]
    assert subprocess.run(["bash", "-nc", script], check=False).returncode == 0


def test_the_commands_run_in_order(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", "fork")
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "number {n} {"word " * 40}"}}\n' for n in range(200)))
    lines = [line for line in shown_commands(README) if line.startswith("hfdist ")]
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [words[0] for words in commands].count("pretrain") >= 4
    for words in commands:
        words = [word.replace("/texts/*.parquet", str(tmp_path / "texts.jsonl")) for word in words]
        small = () if words[0] == "audit" else SMALL
        done = run_forked(*words, *small, cwd=tmp_path, script=command.__file__)
        assert done.returncode == 0, (words, done.stderr)
