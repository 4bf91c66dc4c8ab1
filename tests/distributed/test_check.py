"""What `hfdist check` says: what it calls yes trains, what it calls no is refused by a run, with the same words."""

import json
import logging
import os
import sys
import time

import pytest
from transformers import AutoConfig

from hfdist.config.cli.recipe_names import NAMES
from hfdist.config.task import TaskName
from hfdist.errors import ConfigError
from hfdist.strategies.pipelines.pipeline import PipelineEngine
from hfdist.testing import RankFailed
from hfdist.verify.check import answers, command, small_run
from hfdist.verify.check.answers import Checker, Verdict, largest_difference
from hfdist.verify.check.questions import Question, ask_layouts, ask_others, ask_tasks
from hfdist.verify.check.small_run import Step
from tests.distributed.runs import losses, pretrain
from tests.marks import many
from tests.zoo.models import tiny_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", autouse=True)
def _cache(cache_dir): ...


def layout(name):
    return next(question for question in ask_layouts("pretrain") if question.choice == name)


def choice(name):
    return next(question for question in ask_others("pretrain") if question.choice == name)


def folder_of(path, model_type):
    """A folder without weights."""
    tiny_config(model_type).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", ["pipeline", many("zero2"), many("tensor")])
def test_a_layout_that_is_called_yes_trains(tmp_path, name):
    question = layout(name)
    assert Checker("tiny").answer(question).verdict is Verdict.yes
    run = pretrain(tmp_path, 2, *question.overrides, "train.max_steps=3")
    assert len(losses(run)) == 3


def test_a_run_refuses_with_the_same_words(tmp_path):
    question = layout("moe")
    answer = Checker("tiny").answer(question)
    assert answer.verdict is Verdict.no
    with pytest.raises(RankFailed) as refused:
        pretrain(tmp_path, 2, *question.overrides)
    assert refused.value.__cause__.texts() == answer.reason.texts()


def test_the_real_sizes_count(tmp_path):
    """The small model has more blocks than this one."""
    AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=1).save_pretrained(tmp_path)
    answer = Checker(str(tmp_path)).answer(layout("pipeline"))
    assert answer.verdict is Verdict.no
    assert "block" in answer.reason.what


@pytest.mark.parametrize(
    ("ours", "reference", "difference"),
    [
        ((4.0, 0.0), (4.0, 0.0), 0.0),
        ((4.0, 1e-9), (4.0, 0.0), float("inf")),
        ((4.0, 1.5), (4.0, 1.0), 0.5),
        ((float("inf"), 1.0), (float("inf"), 1.0), float("inf")),
    ],
)
def test_norms_may_be_zero(ours, reference, difference):
    assert largest_difference([Step(*ours)], [Step(*reference)]) == difference


def test_numbers_that_are_none_differ_most():
    assert largest_difference([Step(1.0, float("nan"))], [Step(1.0, 1.0)]) == float("inf")


def test_a_layout_that_computes_something_else_is_seen(monkeypatch):
    scale = PipelineEngine._scale
    monkeypatch.setattr(PipelineEngine, "_scale", lambda self, loss: 1.1 * scale(self, loss))
    answer = Checker("tiny").answer(layout("pipeline"))
    assert answer.verdict is Verdict.no
    assert "1e-01" in str(answer.reason.found)


def test_model_code_has_limits(monkeypatch):
    monkeypatch.setattr(small_run, "build_model", lambda *_, **__: time.sleep(60))
    monkeypatch.setattr(small_run, "_SECONDS", 1.0)
    answer = Checker("tiny").answer(layout("single"))
    assert answer.verdict is Verdict.untried
    assert "did not finish" in str(answer.reason.found)


def test_a_model_of_which_no_small_one_trains_is_not_refused(tmp_path):
    checker = Checker(folder_of(tmp_path, "zamba2"))
    answer = checker.answer(layout("single"))
    assert (answer.verdict, answer.reason.what) == (Verdict.untried, small_run._WHAT)


def test_adapters_attention_and_packing_have_the_reasons_of_a_run(tmp_path):
    checker = Checker(folder_of(tmp_path, "bert"))
    found = {
        name: checker.answer(choice(name)) for name in ("lora of attention", "lora of experts", "varlen", "best_fit")
    }
    assert {name: answer.verdict.value for name, answer in found.items()} == {
        "lora of attention": "yes", "lora of experts": "no", "varlen": "no", "best_fit": "yes",
    }  # fmt: skip
    assert "no matrices of experts" in found["lora of experts"].reason.what
    assert "looks for no documents" in found["varlen"].reason.what
    assert "see each other" in found["best_fit"].remark


@pytest.mark.parametrize(
    ("model_type", "fields", "command", "verdict"),
    [
        ("bert", {}, "pretrain", "sees the next ones"),
        ("bert", {"is_decoder": True}, "dpo", "documents are packed"),
        ("bert", {}, "reward", "no layer `score`"),
        ("bart", {}, "classify", None),
        many("t5", {}, "reward", "no layer `score`"),
        ("t5", {}, "embed", "only beside a target"),
        ("t5", {}, "seq2seq", None),
    ],
)
def test_a_task_is_taken_as_a_run_takes_it(tmp_path, model_type, fields, command, verdict):
    """Refused are those that a run refuses once its model is built, too."""
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    answer = Checker(str(tmp_path)).answer(Question(about="task", choice=command, command=command))
    assert answer.verdict is (Verdict.yes if verdict is None else Verdict.no)
    assert verdict is None or verdict in answer.reason.what


def test_each_task_is_asked_once():
    asked = [question.command for question in ask_tasks()]
    assert {f"task={name.value}" for name in TaskName if name is not TaskName.causal_lm} <= {
        override for name in asked for override in NAMES[name][1]
    }
    assert {"pretrain", "finetune"} <= {*asked}
    assert len({NAMES[name] for name in asked}) == len(asked)


def test_code_of_a_repository_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
        )
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match="Python code of its own"):
        list(Checker(str(tmp_path)).answers())
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command, and undo what it does to its process."""
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hfdist check", *arguments])
        command.main()
        return capsys.readouterr().out

    yield run
    logging.disable(logging.NOTSET)


def test_the_command_writes_a_table_and_json(monkeypatch, call):
    of_tasks = [Question(about="task", choice=name, command=name) for name in ("pretrain", "reward")]
    monkeypatch.setattr(answers, "ask_tasks", lambda: iter(of_tasks))
    monkeypatch.setattr(answers, "ask_layouts", lambda name: iter([layout("moe")]))
    monkeypatch.setattr(answers, "ask_others", lambda name: iter([]))
    lines = call("tiny").splitlines()
    assert lines[:4] == ["task", *(f"  {name:<18} yes" for name in ("pretrain", "reward")), "layout"]
    assert lines[4].startswith("  moe                no, because transformers has no plan")
    del of_tasks[1:]
    content = json.loads(call("model=tiny", "--json"))
    assert [one["answer"] for one in content["answers"]] == ["yes", "no"]
    assert content["answers"][-1]["command"] == "hfdist pretrain strategy=moe"


@pytest.mark.parametrize("arguments", [(), ("./nowhere",), ("tiny", "jsn=true")])
def test_a_mistake_is_one_message(call, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("Config error") == 1
