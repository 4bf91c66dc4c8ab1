"""The evaluation harness on the exported model, with a task of one's own; without its package, a word about it."""

import importlib.util
import json
import sys

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.records import RunFolder, read_lines
from hfdist.topology import Topology
from hfdist.trainer.evaluation import lm_eval
from hfdist.trainer.evaluation.evaluators import check_named
from tests.distributed.runs import SMALL, pretrain

IS_THERE = importlib.util.find_spec("lm_eval") is not None
HERE = pytest.mark.skipif(not IS_THERE, reason="pip install lm-eval")

TASK = """\
task: toy_words
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/toy.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.skipif(IS_THERE, reason="lm-eval is installed")
def test_a_missing_package_is_said_before_the_training():
    config = compose_config([*SMALL, "evaluate.lm_eval=[hellaswag]"])
    with pytest.raises(ConfigError, match="not installed") as caught:
        check_named(config, Topology())
    assert caught.value.where == "evaluate.lm_eval"
    assert "pip install lm-eval" in caught.value.hint


def test_the_results_become_figures_and_a_table():
    metrics = {"alias": "toy", "sample_len": 8, "acc,none": 0.5, "exact,strict": 0.25, "acc_stderr,none": "N/A"}
    figures = lm_eval.figures({"results": {"a/toy": metrics}})
    assert figures == {"lm_eval/a/toy/acc": 0.5, "lm_eval/a/toy/exact,strict": 0.25}
    assert lm_eval.table(figures) == "  a/toy  acc           0.5000\n  a/toy  exact,strict  0.2500"


def test_the_error_of_the_harness_is_told():
    with pytest.raises(lm_eval.HarnessError, match=r"^TypeError: measure\(\) missing 6 required"):
        lm_eval._run_child("measure", {})


def test_a_part_of_an_answer_is_an_error_of_the_harness(monkeypatch):
    """As a full disk leaves it."""
    code = "import sys; open(sys.argv[1], 'w').write('{\"answer\": ['); sys.exit('No space left')"
    monkeypatch.setattr(lm_eval, "module", lambda *words: [sys.executable, "-S", "-c", code, words[-1]])
    with pytest.raises(lm_eval.HarnessError, match="No space left"):
        lm_eval._run_child("measure", {})


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "toy.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    rows = [{"question": f"def f{n}(x):", "choices": [" return x", " import os"], "answer": n % 2} for n in range(4)]
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@HERE
@pytest.mark.timeout(600)
def test_the_exported_model_is_measured(tmp_path, cache_dir, tasks):
    settings = ("train.max_steps=3", "data.workers=0", "data.eval_sequences=2")
    run = pretrain(
        tmp_path / "run", 2, "strategy=ddp", *settings, "evaluate.lm_eval=[toy_words]",
        f"evaluate.lm_eval_include={tasks}",
    )  # fmt: skip
    results = json.loads(RunFolder(run).lm_eval.read_text())
    accuracy = results["results"]["toy_words"]["acc,none"]
    assert accuracy in (0, 0.25, 0.5, 0.75, 1)
    assert read_lines(RunFolder(run).metrics)[-1]["lm_eval/toy_words/acc"] == accuracy
    assert "lm_eval_include" not in (run / "config.yaml").read_text().split("defaults:")[1]


@HERE
@pytest.mark.timeout(600)
def test_an_unknown_task_is_named_before_the_training(tasks):
    config = compose_config([*SMALL, "evaluate.lm_eval=[toy_word]", f"evaluate.lm_eval_include={tasks}"])
    with pytest.raises(ConfigError, match="no such task") as caught:
        check_named(config, Topology())
    assert caught.value.hint == "evaluate.lm_eval=[toy_words]"
