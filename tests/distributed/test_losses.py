"""Losses of every kind, in uneven micro batches and on several ranks: as the original's, of all rows at once."""

import deepspeed
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, TrainerCallback, TrainingArguments

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError
from hfdist.testing import RankFailed, run_ranks
from tests.distributed.trainers import on_ranks
from tests.marks import many
from tests.zoo.models import tiny_config

pytestmark = pytest.mark.distributed

LENGTH, GLOBAL_BATCH, NUM_ROWS = 8, 6, 8
"""The second step of each epoch has two rows, of which only some ranks have any."""
NUM_LABELS = 3


class Classifier(nn.Module):
    """Neither a language model nor of transformers: one label a row, and its loss is a mean over rows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, NUM_LABELS)

    def forward(self, input_ids, labels=None, **ignored):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Autoencoder(nn.Module):
    """Has no labels."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 4), nn.Linear(4, 64)

    def forward(self, input_ids, return_loss=True):
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten()), "logits": logits}


def make_items(label):
    """Rows of tokens, each with what `label` gives for its number and tokens; shares of targets are very different."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 60, (LENGTH,), generator=generator) for _ in range(NUM_ROWS)]
    return [{"input_ids": row, **label(number, row)} for number, row in enumerate(rows)]


def of_tokens(number, row):
    return {"labels": torch.where(torch.arange(LENGTH) < number * 5 % LENGTH, -100, row)}


def of_classes(number, row):
    return {"labels": torch.where(torch.arange(LENGTH) < number * 5 % LENGTH, -100, row % NUM_LABELS)}


def of_row(number, row):
    return {"labels": number % NUM_LABELS}


def of_span(number, row):
    return {"start_positions": number % LENGTH, "end_positions": (number + 3) % LENGTH}


BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 64}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64,
      "decoder_start_token_id": 0}  # fmt: skip
KINDS = {
    "causal": ("LlamaForCausalLM", "llama", of_tokens),
    "causal that does not shift": ("BartForCausalLM", "bart", of_tokens),
    "masked": ("BertForMaskedLM", BERT, of_tokens),
    "encoder and decoder": ("T5ForConditionalGeneration", T5, of_tokens),
    "token classes": ("BertForTokenClassification", BERT, of_classes),
    "classes": ("BertForSequenceClassification", BERT, of_row),
    "number": ("BertForSequenceClassification", BERT | {"num_labels": 1}, lambda number, row: {"labels": number - 3.5}),
    "spans": ("BertForQuestionAnswering", BERT | {"num_labels": 2}, of_span),
    "module": (Classifier, None, of_row),
    "no labels": (Autoencoder, None, lambda number, row: {}),
}


def make_model(kind):
    name, fields, _ = KINDS[kind]
    torch.manual_seed(0)
    if not isinstance(name, str):
        return name()
    config = tiny_config(fields, 2) if isinstance(fields, str) else AutoConfig.for_model(**{"num_labels": 3} | fields)
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    return getattr(transformers, name)(config)


class Watcher(TrainerCallback):
    """Counts what a progress bar shows."""

    num_predictions = 0

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        self.num_predictions += len(eval_dataloader) > 0


def make_trainer(folder, kind, trainer_class, *, strategy=None, train_batch_size=1, eval_batch_size=2, **named):
    fields = {"per_device_train_batch_size": train_batch_size, "per_device_eval_batch_size": eval_batch_size,
              "num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 1.0, "logging_steps": 1,
              "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    arguments = TrainingArguments(str(folder), **fields | (strategy.training_arguments() if strategy else {}))
    if strategy is not None:
        strategy.start()
        named["strategy"] = strategy
    return trainer_class(make_model(kind), arguments, train_dataset=make_items(KINDS[kind][2]), **named)


def make_strategy(sharding, pipeline=1):
    sizes = {"global_batch_size": GLOBAL_BATCH, "sequence_length": LENGTH}
    return hfdist.make_strategy(sharding=sharding, pipeline=pipeline, **sizes)


def run(folder, kind, trainer_class, **named):
    """Two epochs of two uneven steps, then an evaluation."""
    watcher = Watcher()
    held_out = make_items(KINDS[kind][2])[:7]
    trainer = make_trainer(folder, kind, trainer_class, eval_dataset=held_out, callbacks=[watcher], **named)
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return steps, trainer.evaluate()["eval_loss"], watcher.num_predictions


def with_strategy(folder, kinds, sharding, pipeline=1):
    return {
        kind: run(folder, kind, hfdist.Trainer, strategy=make_strategy(sharding, pipeline), eval_batch_size=2)
        for kind in kinds
    }


def all_at_once(folder):
    """The original, whose steps and evaluation are one batch each: it has nothing to weigh."""
    return {
        kind: run(folder, kind, transformers.Trainer, train_batch_size=GLOBAL_BATCH, eval_batch_size=7)
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return run_ranks(all_at_once, 1, tmp_path_factory.mktemp("original"), group=False)[0]


@pytest.mark.parametrize(
    ("sharding", "num_ranks", "kinds"),
    [
        (Sharding.none, 3, ["causal", "masked", "encoder and decoder", "classes", "module", "no labels"]),
        many(Sharding.none, 3, list(KINDS)),
        many(Sharding.zero2, 2, ["causal that does not shift", "number"]),
        (Sharding.zero3, 2, ["number", "spans"]),
    ],
)
def test_weighs_as_if_all_were_one_batch(originals, tmp_path, sharding, num_ranks, kinds):
    for found in run_ranks(with_strategy, num_ranks, tmp_path, kinds, sharding):
        for kind in kinds:
            check(found[kind], originals[kind])
            assert found[kind][2] == -(-7 // (2 * num_ranks)), "batches of a rank"


def test_weighs_so_in_a_pipeline(originals, tmp_path):
    for found in run_ranks(with_strategy, 2, tmp_path, ["causal that does not shift", "masked"], Sharding.none, 2):
        for kind, seen in found.items():
            check(seen, originals[kind])


def check(found, expected):
    assert len(found[0]) == len(expected[0]) == 4
    for step, expected_step in zip(found[0], expected[0], strict=True):
        assert step == pytest.approx(expected_step, rel=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


def test_a_pipeline_refuses_rows_without_labels(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "unlabelled", ("LlamaForCausalLM", "llama", lambda number, row: {}))
    with pytest.raises(RankFailed, match="whole numbers as labels"):
        run_ranks(with_strategy, 2, tmp_path, ["unlabelled"], Sharding.none, 2)


def unusual_evaluations(folder, sharding):
    """Before training, without labels, and without data."""
    items = make_items(of_tokens)
    trainer = make_trainer(folder, "masked", hfdist.Trainer, strategy=make_strategy(sharding))
    before = trainer.evaluate(items)["eval_loss"]
    without_labels = trainer.evaluate([{"input_ids": item["input_ids"]} for item in items])
    assert "eval_runtime" in without_labels
    assert "eval_loss" not in without_labels
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        trainer.evaluate()
    trainer.train()
    return before, trainer.evaluate(items)["eval_loss"]


def test_evaluations_before_training_without_labels_and_without_data(tmp_path):
    expected = run_ranks(unusual_evaluations, 1, tmp_path, Sharding.none)[0]
    assert expected[0] > expected[1]
    for found in run_ranks(unusual_evaluations, 2, tmp_path, Sharding.zero2):
        assert found == pytest.approx(expected, rel=1e-5)


@on_ranks(1)
def test_a_model_that_zero3_has_partitioned_is_not_evaluated_before_training(tmp_path):
    trainer = make_trainer(tmp_path, "causal", hfdist.Trainer, strategy=make_strategy(Sharding.zero3))
    assert trainer.evaluate(make_items(of_tokens))["eval_loss"] > 0
    deepspeed.zero.Init(module=trainer.model, dtype=torch.float32)
    with pytest.raises(ConfigError, match="eval_on_start"):
        trainer.evaluate(make_items(of_tokens))
