"""Adapters and frozen parameters train in every layout as in one process, and what they leave opens in PEFT."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hfdist.config.train import Precision
from hfdist.verify.parity import BOUNDS, compare_runs
from tests.distributed.runs import eval_losses, losses, pretrain

pytestmark = pytest.mark.distributed

NUM_STEPS = 3
SHORT = (
    "data.sequence_length=32",
    "data.eval_sequences=2",
    f"train.max_steps={NUM_STEPS}",
    "checkpoint.every=1",
    f"checkpoint.keep={NUM_STEPS}",
    "adapter.merge=false",
    "optimizer.eps=1e-4",  # Adam makes whole steps of gradients that are zero but for rounding
    # So that runs of fewer steps are the beginning of longer ones.
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8")
DORA = (*LORA, "adapter.dora=true")
LOKR = ("adapter.type=lokr", "adapter.rank=4")
QLORA = ("adapter=qlora", "adapter.rank=4", "adapter.alpha=8")
HEAD = (*LORA, "adapter.modules_to_save=[lm_head]")
LAYOUTS = {
    "zbv": ("strategy=pipeline", "strategy.schedule=zbv"),
    "pipeline_fsdp2": ("strategy=fsdp2", "strategy.pipeline=2", "strategy.schedule=zbv"),
    "fsdp2_tensor": ("strategy=fsdp2", "strategy.tensor=2"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, cache_dir):
    """A model that a run has left."""
    return pretrain(tmp_path_factory.mktemp("base"), 1, "train.max_steps=3", "model.config.num_hidden_layers=4")


@pytest.fixture(scope="module")
def run(base):
    """Fine-tune it."""

    def start(folder, num_processes, *overrides):
        fixed = ("model=hub", f"model.name={base / 'model'}", *SHORT)
        return pretrain(folder, num_processes, *fixed, *overrides)

    return start


@pytest.fixture(scope="module")
def single(run, tmp_path_factory):
    """The reference for each choice of what is trained, made once."""
    made = {}

    def get(choice):
        if choice not in made:
            made[choice] = run(tmp_path_factory.mktemp("single"), 1, "strategy=single", *choice)
        return made[choice]

    return get


@pytest.mark.parametrize(
    ("strategy", "num_processes", "choice"),
    [
        ("zero3", 2, LORA),
        ("fsdp2", 2, HEAD),
        ("pipeline", 2, (*LORA, "train.gradient_checkpointing=true")),
        ("pipeline_fsdp2", 4, LORA),
        ("pipeline", 2, DORA),
        ("pipeline", 2, QLORA),
        ("ddp", 2, QLORA),
        ("zero3", 2, LOKR),
        ("zbv", 2, HEAD),
        ("tensor", 2, HEAD),
        ("tensor", 2, (*DORA, "adapter.targets=[q_proj]")),
        ("fsdp2_tensor", 4, LORA),
    ],
)
def test_trains_as_one_process_does(run, single, tmp_path, strategy, num_processes, choice):
    reference = single(choice)
    ours = run(tmp_path, num_processes, *LAYOUTS.get(strategy, (f"strategy={strategy}",)), *choice)
    rows = compare_runs(ours, reference, BOUNDS[Precision.fp32])
    assert all(row.passed for row in rows), rows
    assert losses(reference)[-1] != losses(reference)[0]


@pytest.mark.parametrize(("first", "choice"), [("zero3", LORA), ("ddp", QLORA)])
def test_goes_on_in_any_other_layout(run, single, tmp_path, first, choice):
    """Three lives, each in another layout, make the steps of one.

    Frozen weights without adapters pass through the same layouts in test_layout_changes.py."""
    reference = single(choice)
    for steps, (strategy, num_processes) in enumerate([(first, 2), ("pipeline", 2), ("single", 1)], start=1):
        run(tmp_path, num_processes, f"strategy={strategy}", *choice, f"train.max_steps={steps}")
    rows = compare_runs(tmp_path, reference, BOUNDS[Precision.fp32])
    assert all(row.passed for row in rows), rows


def test_noise_on_the_embedding_is_added_in_training_alone(run, single, tmp_path):
    """NEFTune is the Trainer's own: here it must reach the stages of a pipeline, and end with the training."""
    still = ("optimizer.lr=1e-30", *LORA)
    noisy = run(tmp_path, 2, "strategy=pipeline", *still, "+train.arguments.neftune_noise_alpha=50")
    quiet = single(still)
    assert all(abs(a - b) > 1e-2 for a, b in zip(losses(noisy), losses(quiet), strict=True))
    assert eval_losses(noisy) == pytest.approx(eval_losses(quiet), rel=1e-6)


def test_the_adapter_opens_in_peft_and_merges(run, base, tmp_path):
    ours = run(tmp_path, 2, "strategy=zero3", *HEAD, "adapter.merge=true", "report.sample_prompt=def")
    model = AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(model(base / "model"), ours / "adapter")(tokens).logits
        by_checkpoint = PeftModel.from_pretrained(
            model(base / "model"), ours / "checkpoints" / f"step-{NUM_STEPS:08d}"
        )(tokens).logits
        merged_model = model(ours / "model", dtype="auto")
        merged = merged_model(tokens).logits
        before = model(base / "model")(tokens).logits
    assert merged_model.dtype == model(base / "model", dtype="auto").dtype
    assert torch.equal(by_peft, by_checkpoint)
    assert torch.allclose(by_peft, merged, atol=1e-5)
    assert not torch.allclose(before, merged, atol=1e-3)
