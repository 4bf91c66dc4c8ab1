"""Losses of every kind, in uneven micro batches and on several ranks: as the original's, where that sees all at once."""

import pytest
import torch
import transformers
import transformers.models.bert.modeling_bert  # inherited by every rank, which else takes seconds
import transformers.models.t5.modeling_t5  # as above
from torch import nn
from transformers import AutoConfig, TrainerCallback, TrainingArguments

import hfdist
from hfdist.config.batch import plan_batch
from hfdist.config.strategy import Sharding, StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.strategies.select import select_strategy
from hfdist.testing import run_ranks
from hfdist.topology import Degrees, Topology
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
    "module": (None, None, of_row),
}


def make_model(kind):
    name, fields, _ = KINDS[kind]
    torch.manual_seed(0)
    if name is None:
        return Classifier()
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


def run(folder, kind, trainer_class, *, strategy=None, train_batch_size=1, eval_batch_size=2):
    """Two epochs of two uneven steps, then an evaluation."""
    fields = {"per_device_train_batch_size": train_batch_size, "per_device_eval_batch_size": eval_batch_size,
              "num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 1.0, "logging_steps": 1,
              "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    arguments = TrainingArguments(str(folder), **fields | (strategy.training_arguments() if strategy else {}))
    named = {} if strategy is None else {"strategy": strategy}
    if strategy is not None:
        strategy.start()
    items, watcher = make_items(KINDS[kind][2]), Watcher()
    trainer = trainer_class(
        make_model(kind), arguments, train_dataset=items, eval_dataset=items[:7], callbacks=[watcher], **named
    )
    trainer.train()
    steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return steps, trainer.evaluate()["eval_loss"], watcher.num_predictions


def with_strategy(folder, kinds, sharding):
    topology = Topology.from_environment(Degrees())
    batch = plan_batch(
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=1,
        data_size=topology.data_size,
        sequence_length=LENGTH,
        lanes=6,
    )
    found = {}
    for kind in kinds:
        strategy = select_strategy(
            StrategyConfig(sharding=sharding), TrainConfig(max_grad_norm=1.0), topology=topology, batch=batch
        )
        found[kind] = run(folder, kind, hfdist.Trainer, strategy=strategy)
    return found


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
        (Sharding.none, 1, list(KINDS)),
        (Sharding.none, 3, list(KINDS)),
        (Sharding.zero2, 2, ["causal that does not shift", "number"]),
        (Sharding.zero3, 2, ["causal that does not shift", "spans"]),
    ],
)
def test_weighs_as_if_all_were_one_batch(originals, tmp_path, sharding, num_ranks, kinds):
    for found in run_ranks(with_strategy, num_ranks, tmp_path, kinds, sharding):
        for kind, (steps, eval_loss, num_predictions) in found.items():
            expected_steps, expected_loss, _ = originals[kind]
            assert len(steps) == len(expected_steps) == 4
            for step, expected in zip(steps, expected_steps, strict=True):
                assert step == pytest.approx(expected, rel=1e-4), kind
            assert eval_loss == pytest.approx(expected_loss, rel=1e-4), kind
            assert num_predictions == -(-7 // (2 * num_ranks)), "batches of a rank"
