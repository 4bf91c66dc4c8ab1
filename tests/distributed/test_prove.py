"""The proof of a layout: right layouts pass, and a mistake planted into one is seen."""

import re
import sys

import pytest
import torch

from hfdist.config.composition.compose import compose_config
from hfdist.data import TokenStream
from hfdist.pipeline.pipeline import split_batch
from hfdist.strategies import pipeline
from hfdist.strategies.base import Engine
from hfdist.strategies.pipeline import PipelineEngine
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.trainer import DistributedTrainerMixin
from recipes.prove import main

pytestmark = pytest.mark.distributed

SMALL = ("model=tiny", "data.sequence_length=32", "data.workers=0", "train.global_batch_size=8",
         "train.micro_batch_size=1", "optimizer.lr=3e-3", "optimizer.warmup_steps=20")  # fmt: skip


def proved(overrides, plant=None):
    """On a rank: run the recipe, with a mistake that the run on one process does not have."""
    if plant is not None:
        plant()
    main.__wrapped__(compose_config([*SMALL, *overrides]))


def prove(folder, num_processes, *overrides, plant=None):
    run_ranks(proved, num_processes, [f"run.dir={folder}", *overrides], plant, group=num_processes > 1)


@pytest.mark.parametrize(
    ("strategy", "num_processes", "precision"), [("ddp", 2, "fp32"), ("zero2", 2, "fp32"), ("zero3", 2, "bf16")]
)
def test_right_layouts_pass(tmp_path, cache_dir, capfd, strategy, num_processes, precision):
    prove(tmp_path, num_processes, f"strategy={strategy}", f"train.precision={precision}")
    said = capfd.readouterr().err
    assert said.count("CERTIFICATE: passed") == 1
    assert f"{num_processes} processes: data {num_processes}" in said
    assert not (tmp_path / "prove").exists()


def test_an_adapter_in_a_pipeline_passes(tmp_path, cache_dir, capfd):
    prove(tmp_path, 2, "strategy=pipeline", "adapter=lora", "adapter.rank=4")
    assert capfd.readouterr().err.count("CERTIFICATE: passed") == 1


def drop_a_micro_batch():
    """The first of the four that a rank has in a step."""
    original, calls = Engine.forward_backward, []

    def forward_backward(self, batch, num_items, default):
        calls.append(1)
        return torch.zeros(()) if len(calls) % 4 == 1 else original(self, batch, num_items, default)

    Engine.forward_backward = forward_backward


def halve_the_gradients():
    """As where they are averaged but should be summed. Clipping hides it from all figures but the norm before it."""
    original = Engine.clip_grad_norm

    def clip_grad_norm(self, max_norm, default):
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.5)
        return original(self, max_norm, default)

    Engine.clip_grad_norm = clip_grad_norm


def lose_the_cursor():
    TokenStream.load_state_dict = lambda self, state, **options: None


def decay_nothing():
    DistributedTrainerMixin.get_decay_parameter_names = lambda self, model: []


def skip_the_sum_of_tied_gradients():
    PipelineEngine._sum_shared = lambda self: None


def average_over_data_ranks():
    original = PipelineEngine._reduce_gradients

    def reduce_gradients(self):
        original(self)
        for parameter in self.model.parameters():
            parameter.grad.div_(self._strategy.topology.data_size)

    PipelineEngine._reduce_gradients = reduce_gradients


def drop_the_last_micro_batch():
    def split(batch, num_microbatches):
        return [*split_batch(batch, num_microbatches)[:-1], split_batch(batch, num_microbatches)[0]]

    pipeline.split_batch = split


@pytest.mark.parametrize("strategy", ["pipeline", "pipeline_zero1"])
def test_a_pipeline_passes(tmp_path, cache_dir, capfd, strategy):
    layout = ("strategy.pipeline=2", "strategy.schedule=zbv", "model.config.tie_word_embeddings=true")
    prove(tmp_path, 4, f"strategy={strategy}", *layout)
    assert capfd.readouterr().err.count("CERTIFICATE: passed") == 1


@pytest.mark.parametrize(
    ("num_processes", "plant", "seen"),
    [
        (2, skip_the_sum_of_tied_gradients, "gradients of step 1"),
        (4, average_over_data_ranks, "gradient norm"),
        (2, drop_the_last_micro_batch, "gradients of step 1"),
    ],
)
def test_mistakes_planted_into_a_pipeline_fail(tmp_path, cache_dir, num_processes, plant, seen):
    layout = ("strategy=pipeline", "strategy.pipeline=2", "model.config.tie_word_embeddings=true")
    with pytest.raises(RankFailed) as failure:
        prove(tmp_path, num_processes, *layout, plant=plant)
    assert "NumericsError: Numerics error: the layout does not train as one process does" in str(failure.value)
    assert seen in str(failure.value)


@pytest.mark.parametrize(
    ("strategy", "plant", "seen"),
    [
        ("ddp", drop_a_micro_batch, "loss, gradient norm, gradients of step 1, weights at the end, held-out loss"),
        ("ddp", halve_the_gradients, "gradient norm"),
        ("zero2", lose_the_cursor, "loss after resuming, weights after resuming"),
    ],
)
def test_planted_mistakes_fail(tmp_path, cache_dir, strategy, plant, seen):
    with pytest.raises(RankFailed) as failure:
        prove(tmp_path, 2, f"strategy={strategy}", "train.max_grad_norm=0.1", plant=plant)
    assert "NumericsError: Numerics error: the layout does not train as one process does" in str(failure.value)
    assert f"where:   {seen}\n" in str(failure.value)
    assert (tmp_path / "prove" / "layout").is_dir(), "what differs is left for a look at it"


def command_line(overrides):
    decay_nothing()
    sys.argv = ["prove.py", *SMALL, *overrides]
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_a_failed_proof_ends_with_the_code_of_numerics(tmp_path, cache_dir, capfd):
    codes = run_ranks(command_line, 1, [f"run.dir={tmp_path}", "strategy=single"], group=False)
    said = capfd.readouterr().err
    assert codes == [5]
    assert said.count("Numerics error") == 1
    assert re.search(r"where: .*weights at the end", said)


def test_the_run_on_one_process_says_why_it_failed(tmp_path, cache_dir, capfd):
    with pytest.raises(RankFailed, match="the run on one process failed"):
        prove(tmp_path, 1, "strategy=single", plant=break_the_other_process)
    assert "this is neither a word for where to start nor a folder" in capfd.readouterr().err


def break_the_other_process():
    from hfdist.verify import parity

    original = parity._train_single

    def with_a_missing_checkpoint(config, recipe):
        config.checkpoint.resume = str(recipe)
        original(config, recipe)

    parity._train_single = with_a_missing_checkpoint
