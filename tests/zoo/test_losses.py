"""Every type in uneven micro batches: loss, gradient and `eval_loss` of one batch, whatever its forward promises."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainingArguments

import hfdist
from tests.zoo.models import tiny_batch, tiny_model

pytestmark = pytest.mark.zoo

NUM_ROWS, TOLERANCE = 4, 1e-4
ALIGNED = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "musicgen"),
    *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm", "xlnet"),
}
"""They compare each token's logits with its own label, and take `num_items_in_batch` without dividing by it."""
SOME = ("bart", "gemma4_text", "prophetnet", "xlnet")


def uneven_batch(model):
    """Rows of which very different shares are targets."""
    batch = tiny_batch(model, NUM_ROWS)
    labels = batch["labels"].clone()
    for number, row in enumerate(labels):
        row[: 1 + 4 * number] = -100
    return batch | {"labels": labels}


def rows_of(batch):
    """Some types take several rows of the input for one of the labels."""
    return [{name: value.chunk(NUM_ROWS)[number] for name, value in batch.items()} for number in range(NUM_ROWS)]


def joined(rows):
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def whole(model_type):
    """Loss and norm of the gradient of all rows in one batch, and their loss in evaluation."""
    model = tiny_model(model_type)
    batch = uneven_batch(model)
    loss = model(**batch).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with torch.no_grad():
        return loss.item(), norm.item(), model.eval()(**batch).loss.item()


def in_parts(model_type, folder):
    """The same from a Trainer, which trains row by row, and evaluates three rows and one."""
    strategy = hfdist.make_strategy(global_batch_size=NUM_ROWS, sequence_length=16)
    arguments = TrainingArguments(
        str(folder), max_steps=1, learning_rate=0.0, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=3, **strategy.training_arguments(),
    )  # fmt: skip
    model = tiny_model(model_type)
    rows = rows_of(uneven_batch(model))
    trainer = hfdist.Trainer(
        model, arguments, strategy=strategy, train_dataset=rows, eval_dataset=rows, data_collator=joined
    )
    trainer.train()
    step = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return step["loss"], step["grad_norm"], trainer.evaluate()["eval_loss"], trainer.weighted_loss.convention


@pytest.fixture(autouse=True)
def _no_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check(model_type, folder):
    *found, convention = in_parts(model_type, folder)
    assert found == pytest.approx(whole(model_type), rel=TOLERANCE)
    assert convention.shifts == (model_type not in ALIGNED)
    assert model_type not in ALIGNED or not convention.divides


@pytest.mark.parametrize("kind", SOME)
def test_some_types(tmp_path, kind):
    check(kind, tmp_path)


@pytest.mark.many
def test_every_type(tmp_path, model_type):
    check(model_type, tmp_path)
