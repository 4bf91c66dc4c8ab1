"""The recipe that audits: a real run passes, a step is shown, damage ends with exit code 3, mistakes need no torch."""

import shutil

import pytest

from hfdist.data.order.records import RECORD
from tests.e2e.forked import run_forked
from tests.e2e.test_command_line import ROOT, run, watched  # noqa: F401
from tests.e2e.test_pretokenize import SMALL
from tests.unit.data.corpora import texts

pytestmark = pytest.mark.e2e

RECIPE = ROOT / "recipes" / "audit.py"


def test_a_run_is_audited(tmp_path):
    data = tmp_path / "texts"
    data.mkdir()
    for number, text in enumerate(texts()):
        (data / f"{number:02d}.txt").write_text(text)
    settings = [setting for setting in SMALL if not setting.startswith(("checkpoint", "train.max_steps"))]
    corpus = ["data=files", "data.sources.files.path=texts"]
    cache = {"HFDIST_CACHE": str(tmp_path / "cache")}
    trained = run_forked(
        *settings, *corpus, "train.max_steps=4", "checkpoint.every=2", "run.name=x", cwd=tmp_path, **cache
    )
    assert trained.returncode == 0, trained.stderr

    passed = run_forked("run=runs/x", cwd=tmp_path, script=RECIPE, **cache)
    assert passed.returncode == 0, passed.stderr
    assert "steps 1 to 4, 16 sequences of 12 lanes, 1,024 tokens\ncheckpoints compared: steps 2, 4" in passed.stdout
    assert passed.stdout.endswith("AUDIT: passed: every document was seen exactly as often as planned\n")

    shown = run_forked("run=runs/x", "step=4", "text=full", cwd=tmp_path, script=RECIPE, **cache)
    assert shown.returncode == 0, shown.stderr
    assert "sequence 12 of the run: lane 0, sequence 1 of it, from all\n  files:" in shown.stdout
    assert "'data.quarantine=[files:" in shown.stdout

    shutil.copytree(tmp_path / "runs" / "x", tmp_path / "runs" / "y")
    two = run_forked("run=runs/x,runs/y", cwd=tmp_path, script=RECIPE, **cache)
    assert two.returncode == 2
    assert "these runs have not read one stream together" in two.stderr

    path = tmp_path / "runs" / "x" / "ledger" / "lane-00003.records"
    path.write_bytes(path.read_bytes()[: -RECORD.itemsize])
    failed = run_forked("run=runs/x", "processes=2", cwd=tmp_path, script=RECIPE, **cache)
    assert failed.returncode == 3
    assert failed.stdout.endswith("AUDIT: failed\n")
    assert "sequences missing or out of turn: 1\n  lane 3, sequence 1\n" in failed.stdout
    assert failed.stderr.startswith("Data error: the ledger is not what the run was to read\n")


def test_questions_and_mistakes_need_no_torch(tmp_path, watched):  # noqa: F811
    asked = run("--help", cwd=tmp_path, script=RECIPE, **watched)
    assert (asked.returncode, asked.stderr) == (0, "HEAVY=[]\n")
    assert "step=N" in asked.stdout
    wrong = run("rum=x", cwd=tmp_path, script=RECIPE, **watched)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Config error: there is no key `rum`\n")
    assert wrong.stderr.endswith("  try:     run=x\nHEAVY=[]\n")
