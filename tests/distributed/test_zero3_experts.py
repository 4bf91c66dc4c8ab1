"""ZeRO-3 of mixtures whose experts get no token on some rank: nobody waits for ever, and training is that of one."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfdist.config.model import AdapterPart
from hfdist.models.adapter import inject_adapter
from hfdist.models.adapter_parts import aim_at_parts
from hfdist.strategies.deepspeed.expert_modules import find_expert_modules
from hfdist.testing import run_ranks
from tests.distributed.trainers import GLOBAL_BATCH, LENGTH, TINY, history, make_strategy, make_trainer

pytestmark = pytest.mark.distributed

NUM_EXPERTS, NUM_STEPS = 8, 2
STACKED = {**TINY, "eos_token_id": 1, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 1}
MODULES = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
           "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": NUM_EXPERTS,
           "vocab_size": 64, "dropout_rate": 0.0, "decoder_start_token_id": 0,
           "eos_token_id": 1, "router_jitter_noise": 0.0}  # fmt: skip
# Otherwise weights as small as these stay whole.
ZERO3 = {"sharding": "zero3", "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
TYPES = {
    # One parameter has all experts of a block.
    "olmoe": (AutoModelForCausalLM, STACKED),
    # The same, and a leaf of DeepSpeed's own; LoRA of its experts alone is trained, so its first input has no gradient.
    "qwen3_moe": (AutoModelForCausalLM, STACKED | {"moe_intermediate_size": 16, "head_dim": 16}),
    # Each expert is a module, which runs if a token reaches it.
    "switch_transformers": (AutoModelForSeq2SeqLM, MODULES),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of whole models."""
    folder = tmp_path_factory.mktemp("models")
    for model_type, (kind, fields) in TYPES.items():
        torch.manual_seed(0)
        kind.from_config(AutoConfig.for_model(model_type, **fields)).save_pretrained(folder / model_type)
    return folder


def items():
    """Sequences of one token each: all of a sequence is for the same expert."""
    ids = [torch.full((LENGTH,), number * 7 % 64) for number in range(GLOBAL_BATCH * NUM_STEPS)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in ids]


def read_model(models, model_type):
    model = TYPES[model_type][0].from_pretrained(models / model_type)
    if model_type == "qwen3_moe":
        config = LoraConfig(r=3, lora_alpha=6, target_modules=[], task_type="CAUSAL_LM")
        aim_at_parts(model, config, [AdapterPart.experts])
        torch.manual_seed(1)
        inject_adapter(model, config, "default")
    return model


def train(folder, models, layout):
    found = {}
    for model_type in TYPES:
        rows = items()
        trainer = make_trainer(
            folder / model_type,
            make_strategy(**layout),
            model=lambda model_type=model_type: read_model(models, model_type),
            # Adam moves what has no gradient by its momentum, if another element of the same buffer has one.
            arguments={"optim": "sgd", "max_steps": NUM_STEPS},
            train_dataset=rows,
            eval_dataset=rows[:6],
        )
        reached = count_reached(trainer.model)
        trainer.train()
        trainer.save_model(str(folder / model_type / "final"))
        found[model_type] = history(trainer), reached
    return found


def count_reached(model):
    """Note the experts that a token has reached, by the numbers of the blocks that have routers."""
    reached = []

    def note(module, args, output):
        chosen = args[1]
        # Numbers of experts, or a mark for each.
        ids = chosen if chosen.shape[-1] != NUM_EXPERTS else chosen.flatten(0, -2).nonzero()[:, 1]
        reached.append(sorted(set(ids.flatten().tolist())))

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_hook(note)
    return reached


def weights_of(folder):
    [file] = folder.glob("*model.safetensors")
    return load_file(file)


def test_experts_without_tokens_on_some_rank(models, tmp_path):
    [single] = run_ranks(train, 1, tmp_path / "single", models, {}, group=False)
    ranks = run_ranks(train, 2, tmp_path / "ranks", models, ZERO3, timeout_seconds=90)
    for model_type, (reference, _) in single.items():
        assert len(reference) == NUM_STEPS
        reached = [of_rank[model_type][1] for of_rank in ranks]
        # In the same forward of the same block.
        assert any(len({tuple(of_rank[call]) for of_rank in reached}) > 1 for call in range(len(reached[0])))
        for of_rank in ranks:
            for (loss, norm), (expected, expected_norm) in zip(of_rank[model_type][0], reference, strict=True):
                assert loss == pytest.approx(expected, rel=1e-5), model_type
                assert norm == pytest.approx(expected_norm, rel=1e-5), model_type
        weights, expected = (weights_of(tmp_path / place / model_type / "final") for place in ("ranks", "single"))
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Mixture(torch.nn.Module):
    """As code of a repository has it: a list without a forward of its own, of which its owner calls some."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))


def test_a_leaf_is_what_calls_the_experts():
    assert find_expert_modules(torch.nn.ModuleDict({"mlp": Mixture()})) == ["mlp"]
    fields = MODULES | {"num_layers": 1, "num_decoder_layers": 1}
    switch = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("switch_transformers", **fields))
    assert find_expert_modules(switch)
    assert all(name.endswith(".experts") for name in find_expert_modules(switch))
    assert not find_expert_modules(AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **STACKED)))
