"""A mixture of experts on two ranks: saved under the Hub's names, and read in another layout and by transformers."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PrinterCallback, TrainingArguments

import hfdist
from hfdist.testing import forget_parent, run_ranks
from tests.zoo.hub_files import differing
from tests.zoo.models import tiny_model

NUM_BLOCKS, NUM_TOKENS, STEPS = 2, 16, 2


def made(seed):
    return tiny_model("mixtral", NUM_BLOCKS, seed=seed, attention="sdpa")


def train(folder, keys, *, seed=0, start=None):
    forget_parent()
    strategy = hfdist.make_strategy(global_batch_size=4, sequence_length=NUM_TOKENS, **keys)
    args = TrainingArguments(
        str(folder), max_steps=STEPS, use_cpu=True, report_to=[], save_steps=1, disable_tqdm=True, learning_rate=1e-2,
        logging_strategy="no", adam_epsilon=1e-4, **strategy.training_arguments(),
    )  # fmt: skip
    strategy.start()
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 250, (NUM_TOKENS,), generator=random) for _ in range(4 * STEPS)]
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    # Each training makes its model anew, and that has the Hub's names, too.
    trainer = hfdist.Trainer(model_init=lambda: made(seed), args=args, strategy=strategy, train_dataset=dataset)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=start and str(start))
    trainer.save_model(str(folder / "final"))


def train_both(folder):
    train(folder / "pipeline", {"pipeline": 2})
    # Other weights, so that nothing is right but what was read.
    train(folder / "expert", {"expert": 2}, seed=1, start=folder / "pipeline/checkpoint-1")
    train(folder / "fsdp2", {"sharding": "fsdp2"}, seed=1, start=folder / "expert/checkpoint-2")


def test_experts_are_saved_one_by_one_and_read_in_every_layout(tmp_path):
    run_ranks(train_both, 2, tmp_path, timeout_seconds=400)
    made(0).save_pretrained(tmp_path / "original")
    names = load_file(tmp_path / "original/model.safetensors").keys()
    pipeline, expert = tmp_path / "pipeline", tmp_path / "expert"
    saved = load_file(pipeline / "checkpoint-2/model.safetensors")
    assert saved.keys() == names
    assert any(".experts.1.w2.weight" in name for name in names)
    assert not differing(saved, load_file(pipeline / "final/model.safetensors"))
    # The optimizer's state has the model's own names.
    [state] = (pipeline / "checkpoint-2/training_state").glob("optimizer-*")
    assert "model.layers.0.mlp.experts.gate_up_proj/exp_avg" in load_file(state)
    resumed = load_file(expert / "checkpoint-2/model.safetensors")
    for name, tensor in saved.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6)
    # It had nothing left to train.
    assert not differing(load_file(tmp_path / "fsdp2/final/model.safetensors"), resumed)
    model, found = AutoModelForCausalLM.from_pretrained(expert / "final", output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(
        model.state_dict()["model.layers.0.mlp.experts.down_proj"][1],
        resumed["model.layers.0.block_sparse_moe.experts.1.w2.weight"],
    )
