"""The commands that README shows, in its order and in one folder, in small: each finds what those before it have left.

`make readme` does so with all pages, in a fresh clone and environment.
"""

import shlex
import subprocess
import sys

import pytest

from hfdist import __main__ as command
from hfdist.launch import launch
from proofs.follow_readme import pages, script_for, shown_commands, shown_programs
from tests.e2e.forked import end, run_forked, run_script, start_forked
from tests.unit.config.shipped import CONF

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

ROOT = CONF.parent
README = ROOT / "README.md"
SMALL = ("train.max_steps=12", "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_every=null",
         "data.sequence_length=32", "data.eval_sequences=4", "data.workers=0", "report=quiet", "checkpoint.every=6",
         "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
         "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1",
         "model.tokenizer.vocab_size=300", "model.tokenizer.train_bytes=100000")  # fmt: skip


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda path: path.name)
def test_the_script_for_a_clone_reads_as_the_page_does(page, tmp_path):
    script = script_for(page, tmp_path / "texts.jsonl", ["train.max_steps=12"])
    said = subprocess.run(
        ["bash", "-euc", "\n".join(line for line in script.splitlines() if line.startswith("echo "))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == script.splitlines()[1::2]
    assert subprocess.run(["bash", "-nc", script], check=False).returncode == 0


def test_readme_shows_commands():
    words = [line.split()[:2] for line in shown_commands(README)]
    assert words[0] == ["python3", "-m"]
    assert words[1] == ["pip", "install"]
    assert words.count(["hfdist", "pretrain"]) >= 3
    assert ["hfdist", "prove"] in words


def test_the_commands_run_in_order(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setattr(launch, "START_METHOD", "fork")
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "number {n} {"word " * 40}"}}\n' for n in range(200)))
    lines = [line for line in shown_commands(README) if line.startswith("hfdist ")]
    for words in [shlex.split(line, comments=True)[1:] for line in lines]:
        words = [word.replace("/texts/*.parquet", str(tmp_path / "texts.jsonl")) for word in words]
        is_run = words[0] in ("pretrain", "finetune", "prove", "pretokenize")
        small = SMALL if is_run and not any(word.startswith("--") for word in words) else ()
        done = run_forked(*words, *small, cwd=tmp_path, script=command.__file__)
        assert done.returncode == 0, (words, done.stderr)


def start_two(script):
    sys.exit(launch.start_ranks(run_script, script, processes=2, max_restarts=0))


def test_the_program_of_the_page_on_python_trains(tmp_path, cache_dir, monkeypatch):
    ((name, program),) = shown_programs(ROOT / "docs" / "python.md").items()
    (tmp_path / name).write_text(program)
    monkeypatch.setattr(launch, "START_METHOD", "fork")
    log = tmp_path / "log"
    assert end(start_forked(start_two, tmp_path / name, cwd=tmp_path, said=(log, log))) == 0, log.read_text()
    assert (tmp_path / "out" / "checkpoint-10" / "manifest.json").is_file()


def test_the_program_of_the_page_on_rewards_scores(tmp_path):
    page = ROOT / "docs" / "rewards.md"
    ((name, program),) = shown_programs(page).items()
    (tmp_path / name).write_text(program)
    assert shown_commands(page) == [f"python {name}"]
    said = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    scores = [line.split()[-1] for line in said.splitlines()]
    assert f"prints the scores {scores[0]}, {scores[1]} and {scores[2]}." in page.read_text().replace("\n", " ")
