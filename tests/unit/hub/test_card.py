"""The model card: what it says, and what it never shows."""

import json

import pytest
from huggingface_hub import ModelCard

from hfdist.config.composition.compose import compose_config
from hfdist.data import PoolReport
from hfdist.records import RunRecord
from hfdist.run.export.model_card import Exported, public_values, write_card

LINES = [
    {"step": 0, "eval_loss": 3.5},
    {"step": 1, "loss": 3.25},
    {"step": 2, "loss": 3.0},
    {"step": 9, "loss": 2.25},
    {"step": 9, "eval_loss": 2.5},
]
REPORTS = [PoolReport("web", 90, 0.9, 12345, 0.5, 40, 0.99), PoolReport("books", 10, 0.1, 678, 1.5, 20, 0.9)]


@pytest.fixture
def card(tmp_path):
    def write(*overrides, primary="finetune", ranks=2, folder="model", record=None, lines=LINES, loss=2.375):
        record = record or RunRecord(start=1)
        run_dir = tmp_path / "run"
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run_dir / "loss.png").write_bytes(b"a picture")
        config = compose_config([f"run.dir={run_dir}", "run.name=tuned", *overrides], name=primary)
        write_card(run_dir / folder, config, REPORTS, Exported(4, loss, "a" * 40, record), ranks=ranks)
        return ModelCard.load(run_dir / folder / "README.md"), config

    return write


def test_what_it_says(card, tmp_path):
    card, _ = card("model.name=some/base", "data=hub", "data.sources.hub.path=some/texts")
    assert card.data.base_model == "some/base"
    assert card.data.library_name == "transformers"
    assert card.data.datasets == ["some/texts"]
    assert card.data.license is None
    for words in ("# tuned", "some/base", "a" * 40, "| web | 90 | 90.0% | 12,345 | 0.50 |", "step 1 | 3.2500",
                  "training, step 9 | 2.2500", "held out, step 0 | 3.5000 | 33.1", "held out, step 9 | 2.5000",
                  "These weights are of step 4, with a held-out loss of 2.3750",
                  "hfdist run config.yaml launch.processes=2", "torch 2.", "![Losses](loss.png)"):  # fmt: skip
        assert words in card.text, words
    assert (tmp_path / "run" / "model" / "loss.png").read_bytes() == b"a picture"


def test_a_reference_that_follows_and_a_reward_of_nothing_are_said(card):
    follows = ("model.name=some/base", "data=some.jsonl", "task.beta=0.3", "task.ref_model_sync_steps=64")
    text, _ = card(*follows, primary="tune")
    assert "beta 0.3. The reference moves towards the model every 64 steps, by the share 0.6" in text.text
    own = ("task=grpo", "task.rewards={arithmetic: 1.0}", "task.trained_prompts=2")
    text, _ = card(*follows[:2], *own, primary="tune", lines=[], loss=0.0)
    assert "with a held-out reward of 0.0000" in text.text
    assert "2 train" in text.text


def test_a_preference_run_says_its_loss_and_accuracy(card):
    lines = [{"step": 1, "loss": 0.7, "rewards/accuracies": 0.5, "rewards/margins": 0.25},
             {"step": 9, "eval_loss": 0.5, "eval_rewards/accuracies": 0.75, "eval_rewards/margins": 0.5}]  # fmt: skip
    text, _ = card("model.name=some/base", "data=some.jsonl", "task.beta=0.3", primary="tune", lines=lines)
    assert text.data.tags == ["hfdist", "dpo"]
    assert text.data.pipeline_tag == "text-generation"
    for words in ("(DPO, arXiv 2305.18290)", "beta 0.3", "| | loss (mean of pairs) | accuracy | margin |",
                  "| held out, step 9 | 0.5000 | 75.0% | 0.5000 |", "hfdist run config.yaml"):  # fmt: skip
        assert words in text.text, words
    assert "perplexity" not in text.text


def test_a_preference_run_without_a_reference_names_none(card):
    text, _ = card("model.name=some/base", "data=some.jsonl", "task=simpo", "task.nll_weight=0.25", primary="tune")
    for words in ("without a reference model. Loss `simpo`, beta 2, margin 0.5. The loss", "added with weight 0.25"):
        assert words in text.text, words
    assert "the reference is" not in text.text


def test_a_reward_model_classifies(card):
    lines = [{"step": 9, "eval_loss": 0.5, "eval_accuracies": 0.75, "eval_margins": 0.5}]
    text, _ = card("model.name=some/base", "data=some.jsonl", "task=reward", primary="tune", lines=lines)
    assert text.data.pipeline_tag == "text-classification"
    assert "A reward model, fine-tuned from" in text.text
    assert "| held out, step 9 | 0.5000 | 75.0% | 0.5000 |" in text.text


def test_a_run_by_rewards_names_them_and_not_its_loss(card):
    lines = [{"step": 1, "loss": 0.015, "reward": 0.25, "completion_tokens": 7.0},
             {"step": 9, "eval_loss": -0.5, "eval_reward": 0.5, "eval_completion_tokens": 8.0}]  # fmt: skip
    overrides = ["model.name=some/base", "data=some.jsonl", "task=grpo", "task.rewards={arithmetic: 2.0}"]
    text, _ = card(*overrides, primary="tune", lines=lines, loss=-0.5)
    for words in ("(GRPO, arXiv 2402.03300)", "`arithmetic` with weight 2", "8 answers to each prompt",
                  "| training, step 1 | 0.2500 | 7.0 |", "| held out, step 9 | 0.5000 | 8.0 |",
                  "with a held-out reward of 0.5000"):  # fmt: skip
        assert words in text.text, words
    assert "0.015" not in text.text


def test_a_student_names_its_teacher(card):
    overrides = ["model.name=some/base", "data=some.jsonl", "task=distill", "task.teacher=runs/large/model"]
    lines = [{"step": 9, "eval_loss": 0.5}]
    text, _ = card(*overrides, "task.divergence_beta=0.3", primary="tune", lines=lines)
    kept, _ = card(*overrides, "task.teacher_top_k=8", primary="tune", lines=lines)
    assert "its 8 likeliest tokens and a tail." in kept.text
    own, _ = card(*overrides, "task.on_policy=0.25", primary="tune", lines=lines)
    assert "In 25% of the steps it learned from answers of its own." in own.text
    for words in ("(GKD, arXiv 2306.13649)", "Teacher: `runs/large/model`; divergence beta 0.3, temperature 1.",
                  "| | loss (nats a token) |", "| held out, step 9 | 0.5000 |"):  # fmt: skip
        assert words in text.text, words


def test_an_embedding_model_says_how_texts_become_embeddings(card):
    overrides = ["model.name=some/base", "data=some.jsonl", "task=embed", "task.matryoshka=[8,16]", "task.pooling=last"]
    lines = [{"step": 9, "eval_loss": 0.5, "eval_recall_at_1": 0.25, "eval_mrr": 0.4}]
    text, _ = card(*overrides, primary="tune", lines=lines)
    assert (text.data.library_name, text.data.pipeline_tag) == ("sentence-transformers", "sentence-similarity")
    for words in ("An embedding model, fine-tuned from", "(arXiv 1705.00652)", "of the first 8, 16 dimensions",
                  "similarity cosine, pooling last", "| | loss (mean of queries) | recall@1 | MRR |",
                  "| held out, step 9 | 0.5000 | 25.0% | 0.4000 |"):  # fmt: skip
        assert words in text.text, words


def test_its_config_makes_the_same_run_again(card, tmp_path):
    card, config = card("model.name=some/base", "optimizer.lr=3e-4", "data.sources.docstrings.weight=2")
    text = card.text.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.yaml").write_text(text)
    config.model.revision = "a" * 40
    assert compose_config(name="config", extra_dir=tmp_path / "again") == config


def test_energy_is_said_and_emissions_are_where_the_hub_reads_them(card):
    use = RunRecord(start=2, seconds=3600.0, energy_kwh=1.5, earlier_energy_kwh=0.5, energy_source="nvml+estimate",
                    cost=4.0, gco2e=600.0, earlier_gco2e=200.0)  # fmt: skip
    text, _ = card("model.name=some/base", "cost.gco2e_per_kwh=400", "cost.currency=EUR", record=use)
    assert "1 h 0 min, 2 kWh (nvml+estimate), 800 g CO2e, 4 EUR, in 2 starts" in text.text
    assert "is an estimate" in text.text
    assert text.data.co2_eq_emissions == {
        "emissions": 800.0, "source": "hfdist (nvml+estimate), at 400.0 g CO2e a kWh", "training_type": "fine-tuning"
    }  # fmt: skip
    text, _ = card("model.name=some/base", record=RunRecord(start=1, seconds=1800.0))
    assert "Training has used 30 min." in text.text
    assert "co2_eq_emissions" not in text.data.to_dict()
    text, _ = card("model.name=some/base", record=RunRecord(start=2, earlier_gco2e=200.0))
    assert "200 g CO2e, in 2 starts" in text.text
    assert "co2_eq_emissions" not in text.data.to_dict(), "a part would pass for the whole"


def test_budgets_are_not_those_of_others(card):
    text, _ = card("model.name=some/base", "train.max_hours=3", "train.deadline=2020-01-01", "checkpoint.every=100")
    assert "max_hours: null" in text.text
    assert "deadline: null" in text.text


def test_paths_of_this_machine_are_no_names_of_the_hub(card, tmp_path):
    (tmp_path / "base").mkdir()
    text, _ = card(f"model.name={tmp_path / 'base'}", "data=files", f"data.sources.files.path={tmp_path}/x.jsonl")
    assert text.data.base_model is None
    assert text.data.datasets is None
    assert "fine-tuned from `base`" in text.text


@pytest.mark.parametrize("folder", ["model", "adapter"])
def test_weights_in_4_bits_are_named(card, tmp_path, folder):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text("{}")
    text, _ = card("model.name=some/base", "adapter=qlora", folder=folder)
    assert "trained beside frozen weights in 4 bits (nf4, QLoRA)" in text.text
    assert ("merged into the weights as they were before" in text.text) == (folder == "model")
    assert "4 bits" not in card("model.name=some/base", "adapter=lora", folder=folder)[0].text


def test_random_weights_have_no_base(card):
    text, _ = card("model=tiny", primary="pretrain", ranks=1)
    assert text.data.base_model is None
    assert "trained from random weights (llama)" in text.text
    assert "\nhfdist run config.yaml\n" in text.text


def test_an_adapter_is_one(card, tmp_path):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text("{}")
    text, _ = card("model.name=some/base", folder="adapter")
    assert text.data.library_name == "peft"


def test_the_parts_that_an_adapter_stands_beside_are_told(card):
    text, _ = card("model.name=some/base", "adapter=lora", "adapter.target_parts=[attention,experts]")
    assert "by lora beside its attention and experts." in text.text


def test_queries_of_addresses_are_not_published():
    values = {"train": {"arguments": {"url": "https://host/a?version=abc"}}, "list": ["s3://bucket/x"],
              "sample_tokens": 64, "name": "me@home", "text": "From https://a.org/b? Or not."}  # fmt: skip
    assert public_values(values) == {
        "train": {"arguments": {"url": "https://host/a"}}, "list": ["s3://bucket/x"],
        "sample_tokens": 64, "name": "me@home", "text": "From https://a.org/b Or not."}  # fmt: skip
