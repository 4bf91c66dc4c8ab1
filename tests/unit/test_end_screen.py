"""What a run says at its end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.run import AdapterConfig, ReportConfig, RunConfig
from hfdist.config.task import TaskName
from hfdist.data import PoolReport
from hfdist.records import RunRecord
from hfdist.run.end_screen import describe_end
from hfdist.run.ending import Ending, PlannedAndMeasured

CONFIG = compose_config(["model=tiny", "run.name=first", "train.max_steps=20"])
RECORD = RunRecord(
    start=1, step=20, max_steps=20, tokens=40_960, seconds=14.8, energy_kwh=7.65e-6, energy_source="estimate"
)
PRETRAINED = Ending(
    config=CONFIG,
    record=RECORD,
    layout="1 process",
    model_type="llama",
    num_parameters=139_584,
    num_trained=139_584,
    folder=Path("runs/first/model"),
    step=20,
    loss=6.7944,
    without_context=5.6237,
    pools=[PoolReport("all", 320, 1.0, 40_960, 0.034, 1800, 1.0)],
    num_documents=60,
    left_out="1 empty",
    peak_bytes=[{"host": 714 << 20}],
    graded={
        "peak memory": PlannedAndMeasured(708 << 20, 714 << 20),
        "step": PlannedAndMeasured(0.044, 0.169),
        "energy": PlannedAndMeasured(2e-6, 7.65e-6),
        "MFU": PlannedAndMeasured(0.1, 0.2),
    },
)


def tuned(task="causal_lm", **values):
    """A run of a pretrained model on examples."""
    model = replace(CONFIG.model, name="HuggingFaceTB/SmolLM2-135M-Instruct", init=type(CONFIG.model.init).pretrained)
    config = replace(CONFIG, model=model, task=replace(CONFIG.task, name=TaskName(task)), **values)
    return replace(PRETRAINED, config=config, without_context=None, is_chat=True)


def test_a_pretraining_of_few_steps():
    said = describe_end(PRETRAINED)
    assert (
        said
        == """\
first has ended: 20 steps
  trained   a llama of 139,584 parameters, from random weights
  on        stdlib: 40,960 tokens, from 60 of 1,800 documents; 1 empty
  layout    1 process; sharding none
  quality   held-out loss 6.7944, perplexity 892.8; a model without context (unigram) has 5.6237, which is better: \
20 steps are few
  plan      in training: memory of a rank 714 MiB (planned: 708 MiB), a step 169 ms (planned: 44 ms), energy 7.65 mWh \
(planned: 2 mWh)
  peak      host 714 MiB, with evaluations and exports
  used      14.8 s, 7.65 mWh (an estimate)
  model     runs/first/model
to use it:
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained("runs/first/model") for auto in (AutoModelForCausalLM, AutoTokenizer))
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50, \
do_sample=True, top_k=40)[0]))
what comes next:
  hfdist report runs/first                        # makes a page with its curves
  hfdist audit run=runs/first                     # proves that it read the data as planned
  hfdist prove strategy=zero2 launch.processes=2  # shows that two processes train as one does
  hf upload OWNER/NAME runs/first/model           # brings the model to the Hub"""
    )


@pytest.mark.parametrize(
    ("loss", "step", "words"),
    [
        (3.0, 20, "perplexity 20.1; a model without context (unigram) has 5.6237\n"),
        (6.0, 1, "which is better: 1 step is few\n"),
        (6.0, 5000, "which is better: look at the curves and the learning rate\n"),
    ],
)
def test_a_loss_stands_beside_what_it_must_beat(loss, step, words):
    assert words in describe_end(replace(PRETRAINED, loss=loss, step=step, record=replace(RECORD, step=step)))


def test_an_adapter_that_is_not_merged_is_opened_by_peft(tmp_path):
    end = replace(tuned(adapter=AdapterConfig(type="lora", merge=False)), num_trained=9216, folder=tmp_path)
    said = describe_end(end)
    assert "lora, 9,216 parameters beside a llama of 130,368 parameters, from HuggingFaceTB/SmolLM2-135M" in said
    assert "from peft import AutoPeftModelForCausalLM\n" in said
    assert 'chat = [{"role": "user"' in said
    assert "without context" not in said
    assert "held-out loss 6.7944 (7.1000 before training), perpl" in describe_end(replace(end, loss_before=7.1))
    (tmp_path / "config.json").touch()
    end = replace(end, adapter_folder=tmp_path.with_name("adapter"))
    said = describe_end(end)
    assert "peft" not in said, "it is merged"
    assert f"  adapter   {end.adapter_folder}, which is merged" in said


@pytest.mark.parametrize(
    ("task", "names", "given"), [("reward", [], ", num_labels=1"), ("classify", ["a", "b", "c"], ", num_labels=3")]
)
def test_an_adapter_with_labels_says_how_many_its_base_needs(tmp_path, task, names, given):
    end = replace(tuned(task, adapter=AdapterConfig(type="lora", merge=False)), folder=tmp_path)
    end.config.data.labels.names[:] = names
    try:
        said = describe_end(end)
    finally:
        end.config.data.labels.names.clear()
    folder = json.dumps(str(tmp_path))
    opens = f"AutoPeftModelForSequenceClassification.from_pretrained({folder}{given})"
    assert f"model, tokenizer = {opens}, AutoTokenizer.from_pretrained({folder})\n" in said


def test_an_adapter_of_a_model_of_image_and_text_is_opened_by_transformers(tmp_path):
    end = replace(tuned(adapter=AdapterConfig(type="lora", merge=False)), folder=tmp_path, model_type="llava")
    said = describe_end(end)
    assert "peft" not in said
    assert "model, tokenizer = AutoModelForImageTextToText.from_pretrained(" in said


def test_preferences_have_another_measure():
    said = describe_end(replace(tuned("dpo"), loss=0.61, accuracy=0.75, num_held_out=8, margin=0.31))
    assert said.startswith("first has ended: 20 steps of dpo\n")
    assert "(0.6931 before training), accuracy 75 % of 8 pairs (50 % by chance), margin 0.310\n" in said
    assert "perplexity" not in said
    assert "(0.7000 before training)" in describe_end(replace(tuned("dpo"), loss=0.61, loss_before=0.7))
    config = replace(tuned("dpo").config, report=ReportConfig())
    end = replace(tuned("dpo"), config=config, is_chat=False, sample_prompt="2 + 3 =")
    assert 'tokenizer("2 + 3 =", return' in describe_end(end)
    assert "AutoModelForSequenceClassification" in describe_end(tuned("reward"))


@pytest.mark.parametrize(
    ("kind", "name"), [("llava", "ImageTextToText"), ("gemma3", "CausalLM"), ("of_a_repository", "CausalLM")]
)
def test_a_model_is_opened_by_the_class_of_its_type(kind, name):
    assert f"AutoModelFor{name}, AutoTokenizer)" in describe_end(replace(tuned(), model_type=kind))


def test_answers_are_counted_by_their_prompts():
    said = describe_end(replace(tuned("grpo"), loss=-0.25, left_out=None, cut_off=0.5, rewards=(0.1, 0.3)))
    assert "reward 0.3000 in the last step (0.1000 in the first), held-out reward 0.2500, of greedy answers\n" in said
    prompts = "stdlib: 320 of 1,800 prompts"
    assert f"{prompts}; 8 answers to each, 50 % of those of the last step cut off at task.max_new_tokens\n" in said
    assert "head runs/first/rollouts.jsonl " in said
    acting = tuned("grpo")
    acting.config.task.environment = "guess"
    assert "cut off at task.max_turns or task.max_new_tokens\n" in describe_end(replace(acting, cut_off=0.5))
    assert "8 answers to each, 25 % failed by the environment\n" in describe_end(replace(acting, failed_episodes=0.25))
    said = describe_end(replace(tuned("grpo"), loss=None, rewards=(0.0, 0.0), learns_nothing=True))
    assert "(0.0000 in the first), nothing learned: all answers to a prompt always had the same reward\n" in said
    both = {"arithmetic": 0.2, "length": 0.1}
    said = describe_end(replace(tuned("grpo"), loss=None, rewards=(0.1, 0.3), each_reward=both))
    assert "reward 0.3000 in the last step, arithmetic 0.2000, length 0.1000 (0.1000 in the first)\n" in said


def test_a_run_that_a_budget_has_stopped_says_so():
    record = replace(RECORD, step=12, seconds=7200, cost=0.001, energy_kwh=None)
    said = describe_end(replace(PRETRAINED, record=record, step=12, stopped_by="max_hours"))
    assert said.startswith("first has stopped at step 12 of 20: train.max_hours is used up\n")
    assert "used      2 h 0 min, less than 0.01 USD\n" in said
    said = describe_end(replace(PRETRAINED, record=record, step=12, stopped_by="deadline"))
    assert "train.deadline has come\n" in said


def test_what_is_not_known_is_not_said():
    end = replace(PRETRAINED, loss=None, without_context=None, graded={}, peak_bytes=[], pools=[], left_out=None)
    said = describe_end(end)
    assert "quality   not measured: the run has no held-out data\n" in said
    assert "on        40,960 tokens\n" in said
    assert not any(word in said for word in ("plan ", "peak "))


def test_many_ranks_and_pools_stay_one_screen():
    pools = [PoolReport(f"source-{number}", 1, 0.1, 100, 1.5, 60, 0.9) for number in range(10)]
    peaks = [{"host": 1 << 30, "device": (number + 1) << 30} for number in range(64)]
    said = describe_end(replace(PRETRAINED, pools=pools, peak_bytes=peaks, record=replace(RECORD, processes=64)))
    assert "source-3: 100 tokens, 1.50 epochs of 60 documents, sequences filled to 90 %; 6 more; 1 empty" in said
    assert "host 1.0 GiB on each rank; device 1.0 GiB to 64.0 GiB, by rank, with evaluations" in said
    assert "hfdist prove" not in said


def test_the_best_weights_say_their_step_and_odd_folders_are_quoted():
    folder = Path('runs/my "first" run/model')
    said = describe_end(replace(PRETRAINED, step=10, folder=folder))
    assert "model, of step 10, whose held-out loss was the lowest\n" in said
    assert 'from_pretrained("runs/my \\"first\\" run/model")' in said
    assert "hf upload OWNER/NAME 'runs/my \"first\" run/model'" in said


def test_the_default_config_has_a_screen():
    assert describe_end(replace(PRETRAINED, config=RunConfig()))
