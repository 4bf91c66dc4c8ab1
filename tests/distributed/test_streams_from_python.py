"""A token stream that a Trainer from Python reads: it resumes, and goes back to its own training's checkpoints."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from hfdist.data import TokenStream
from hfdist.trainer.fault_tolerance.skip_counter import Tolerance
from hfdist.trainer.run_options import RunOptions
from tests.distributed.trainers import GLOBAL_BATCH, LENGTH, STEPS, TINY, history, make_strategy, make_trainer, on_ranks
from tests.unit.data.corpora import tokenizer
from tests.unit.data.streams import memory_config, memory_corpus

pytestmark = pytest.mark.distributed


class Back(TrainerCallback):
    """Notes where the run goes back to."""

    def __init__(self):
        self.steps = []

    def on_rollback(self, state):
        self.steps.append(state.global_step)


def train(folder, *, resume=None, bad=(), skipped_steps=3, **arguments):
    """Give the Trainer after its training; after each of the steps `bad` one step is spoilt, once."""
    config = memory_config(folder.parent / "cache", sequence_length=LENGTH, lanes=GLOBAL_BATCH)
    stream = TokenStream(memory_corpus(config), tokenizer(), config)
    left = list(bad)

    def loss(outputs, labels, num_items_in_batch=None):
        value = torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if trainer.model.training and trainer.state.global_step in left:
            left.remove(trainer.state.global_step)
            return value * torch.nan
        return value

    torch.manual_seed(0)
    trainer = make_trainer(
        folder,
        make_strategy(micro_batch_size=GLOBAL_BATCH),
        model=AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY | {"vocab_size": 512})),
        arguments=arguments,
        train_dataset=stream,
        compute_loss_func=loss,
        callbacks=[Back()],
        options=RunOptions(limits=Tolerance(skipped_steps=skipped_steps)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def gone_back(trainer):
    return next(one.steps for one in trainer.callback_handler.callbacks if isinstance(one, Back))


EACH_STEP = {"save_strategy": "steps", "save_steps": 1}


@on_ranks(1)
def test_it_goes_on_with_the_same_losses(tmp_path):
    whole = train(tmp_path / "run", **EACH_STEP)
    resumed = train(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"))
    assert len(history(whole)) == STEPS
    assert history(resumed) == history(whole)


@on_ranks(1)
def test_checkpoints_of_another_training_in_the_same_folder_are_not_its_own(tmp_path):
    folder = tmp_path / "run"
    whole = train(folder, **EACH_STEP)
    # A branch of it, which abandons the later ones.
    branch = train(folder, resume=str(folder / "checkpoint-2"), bad=(2, 3), skipped_steps=2)
    assert gone_back(branch) == [2]
    assert history(branch) == history(whole)
    # A new training has not come so far yet.
    new = train(folder, bad=(2,), skipped_steps=1, max_steps=3, save_strategy="steps", save_steps=2)
    assert gone_back(new) == [2]
    assert new.checkpointer.is_saved()
    assert not train(folder).checkpointer.is_saved()
