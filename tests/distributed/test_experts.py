"""Expert parallelism beyond the numbers of test_layouts.py: families, where tokens go, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

import hfdist
from hfdist.errors import ConfigError
from hfdist.strategies import experts, parallel_plans
from hfdist.strategies.parameter_shards import EXPERT
from hfdist.strategies.parts import ModelParts
from hfdist.testing import run_ranks
from tests.distributed.test_optimizers import saved
from tests.distributed.test_tensor import check
from tests.distributed.trainers import GLOBAL_BATCH, STEPS, history, uneven_items
from tests.marks import many
from tests.zoo.sharding import try_types

pytestmark = pytest.mark.distributed

# Plain; norms of queries and keys; shared experts, and blocks without any. The zoo has more, on two ranks.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")


def try_layout(families, layout):
    return try_types(families, **layout)


@pytest.mark.parametrize(
    ("num_ranks", "layout", "families"),
    [
        many(2, {"expert": 2}, ("qwen3_moe",)),
        many(4, {"expert": 4}, ("mixtral",)),
        many(4, {"expert": 2, "sharding": "fsdp2"}, FAMILIES),
        (4, {"expert": 2, "tensor": 2}, ("deepseek_v3",)),
    ],
)
def test_losses_and_gradients_of_accumulated_micro_batches_are_those_of_the_whole_model(num_ranks, layout, families):
    for of_rank in run_ranks(try_layout, num_ranks, families, layout):
        for model_type, outcome in of_rank.items():
            assert outcome.verdict == "exact", (model_type, outcome)
            assert outcome.gradient_difference < 1e-5, (model_type, outcome)


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


def make_model(**fields):
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES | fields))


def make_strategy(**layout):
    return hfdist.make_strategy(global_batch_size=GLOBAL_BATCH, micro_batch_size=2, **layout)


def adapted_model():
    """With LoRA beside attention, the experts and the router."""
    model = make_model()
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "o_proj"], target_parameters=stacks))
    return model


def train(folder, layout, spoil=None, start=None, make=make_model, optimizer="adamw_torch"):
    if spoil is not None:
        spoil()
    strategy = make_strategy(**layout)
    args = TrainingArguments(
        str(folder), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="steps", save_steps=2,
        # Adam divides by it where a gradient is by chance almost zero.
        learning_rate=1e-2, adam_epsilon=1e-5, logging_steps=1, optim=optimizer, **strategy.training_arguments(),
    )  # fmt: skip
    items = uneven_items()
    trainer = hfdist.Trainer(make(), args, strategy=strategy, train_dataset=items, eval_dataset=items[:4])
    trainer.train(resume_from_checkpoint=start)
    return history(trainer), trainer.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, run_ranks(train, 1, folder, {}, group=False)[0]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, {"expert": 2}),
        many(4, {"expert": 4, "sharding": "fsdp2"}),
        # A run goes on in it, below.
        many(4, {"expert": 2, "sharding": "fsdp2"}),
        many(4, {"expert": 2, "context": 2}),
        many(8, {"expert": 2, "sharding": "fsdp2", "replicate": 2, "tensor": 2}),
    ],
)
def test_losses_norms_weights_and_moments_are_those_of_one_process(single, tmp_path, num_ranks, layout):
    folder, reference = single
    check(run_ranks(train, num_ranks, tmp_path, layout)[0], reference, tmp_path, folder)


@pytest.mark.parametrize(
    ("num_ranks", "layout", "make", "optimizer"),
    [
        (2, {"expert": 2}, adapted_model, "adamw_torch"),
        many(4, {"expert": 2, "sharding": "fsdp2"}, adapted_model, "adamw_torch"),
        many(4, {"expert": 4}, adapted_model, "adamw_torch"),
        many(4, {"expert": 2, "tensor": 2}, adapted_model, "adamw_torch"),
        many(4, {"expert": 2, "pipeline": 2}, adapted_model, "adamw_torch"),
        # It needs whole matrices; test_optimizers.py has it in other layouts.
        many(2, {"expert": 2}, make_model, "adafactor"),
        many(4, {"expert": 2, "sharding": "fsdp2"}, make_model, "adafactor"),
    ],
)
def test_adapters_and_other_optimizers(tmp_path, num_ranks, layout, make, optimizer):
    arguments = None, None, make, optimizer
    [reference] = run_ranks(train, 1, tmp_path / "single", {}, *arguments, group=False)
    ours = run_ranks(train, num_ranks, tmp_path / "ranks", layout, *arguments)[0]
    check(ours, reference, tmp_path / "ranks", tmp_path / "single")


@pytest.mark.parametrize(
    ("num_ranks", "layout", "next_num_ranks", "next_layout"),
    [
        (1, {}, 4, {"expert": 2, "sharding": "fsdp2"}),
        many(4, {"expert": 2, "sharding": "fsdp2"}, 2, {"expert": 2}),
        # What it saves is compared with that of one process, above.
        many(2, {"expert": 2}, 1, {}),
    ],
)
def test_a_run_goes_on_in_another_layout(single, tmp_path, num_ranks, layout, next_num_ranks, next_layout):
    folder, (reference, _) = single
    if layout:
        folder = tmp_path / "first"
        run_ranks(train, num_ranks, folder, layout)
    start = str(folder / "checkpoint-2")
    ours, _ = run_ranks(train, next_num_ranks, tmp_path / "next", next_layout, None, start, group=next_num_ranks > 1)[0]
    assert [loss for loss, _ in ours][-2:] == pytest.approx([loss for loss, _ in reference][-2:], rel=1e-6)
    for name, values in saved(single[0]).items():
        assert torch.allclose(saved(tmp_path / "next")[name], values, rtol=1e-4, atol=1e-5), name


def counting_experts_of_one_rank():
    """The mistake of a norm of the experts of the first rank, whatever others hold."""
    ModelParts.counts = lambda parts, name, axes: parts.groups.expert.rank() == 0


def counting_all():
    """The mistake of a norm in which each rank counts what is whole on all."""
    ModelParts.counts = lambda parts, name, axes: True


def adding_up():
    """The mistake of taking gradients of experts, which have come from all tokens of a group, for those of one rank."""
    reduce = ModelParts.reduce_gradients

    def spoilt(parts, model):
        reduce(parts, model)
        for name, parameter in model.named_parameters():
            if parts._axes.get(name) == EXPERT:
                parameter.grad *= parts.groups.expert.size()

    ModelParts.reduce_gradients = spoilt
    parallel_plans.check_plans = lambda *arguments: None


@pytest.mark.many  # as those of test_tensor.py
@pytest.mark.parametrize("spoil", [counting_experts_of_one_rank, counting_all, adding_up])
def test_a_wrong_norm_or_gradient_shows(single, tmp_path, spoil):
    _, (reference, _) = single
    ours, _ = run_ranks(train, 2, tmp_path, {"expert": 2}, spoil)[0]
    # Ten times what the right ones may differ by.
    assert abs(ours[0][1] / reference[0][1] - 1) > 1e-4


def routed_to(expert_ids, fields, layout):
    """Train a micro batch with a router that chooses these experts for every token, and count what each rank computes.

    Returns:
        The loss of this rank, the same of the whole model, and the pairs of tokens and experts that came here.
    """
    whole = make_model(**fields)
    for block in whole.model.layers:
        block.mlp.gate.register_forward_hook(lambda module, args, outputs: choose(outputs, expert_ids))
    num_pairs = 0
    own = [id(block.mlp.experts) for block in whole.model.layers]

    def count(module, ids):
        nonlocal num_pairs
        num_pairs += ids.numel()

    batch = torch.randint(0, 64, (1, 5 + 4 * dist.get_rank()), generator=torch.Generator().manual_seed(dist.get_rank()))
    reference = whole(input_ids=batch, labels=batch).loss
    for block in whole.model.layers:
        forward = block.mlp.experts.forward

        def counted(states, ids, weights, forward=forward):
            count(None, ids)
            return forward(states, ids, weights)

        block.mlp.experts.forward = counted
    assert len(own) == len(whole.model.layers)
    parallel_plans.check_plans = lambda *arguments: None
    model = make_strategy(**layout).build(whole).model
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return float(loss), float(reference), num_pairs


def choose(outputs, expert_ids):
    logits, weights, ids = outputs
    return logits, weights, torch.tensor(expert_ids, device=ids.device).expand_as(ids)


@pytest.mark.parametrize("expert_ids", [[0, 1], many([0, 3]), many([3, 2])])
def test_every_token_is_computed_whichever_experts_are_chosen(expert_ids):
    """No token is dropped where all go to one rank; the other gets none, and still takes part."""
    num_blocks, num_pairs = SIZES["num_hidden_layers"], 2 * (5 + 9)
    found = run_ranks(routed_to, 2, expert_ids, {}, {"expert": 2})
    for loss, reference, _ in found:
        assert loss == pytest.approx(reference, rel=1e-6)
    for rank, (_, _, computed) in enumerate(found):
        share = sum(expert // 2 == rank for expert in expert_ids) / 2
        # Where nothing comes, transformers computes one row that counts for nothing.
        assert computed == (share * num_pairs or 1) * num_blocks


def refusal(fields, layout):
    with pytest.raises(ConfigError) as caught:
        make_strategy(**layout).build(make_model(**fields))
    return caught.value


def doubled(families, layout):
    """The mistake: what comes back from the experts counts twice."""
    spread = experts.spread_experts

    def spoilt(model, *arguments):
        shards = spread(model, *arguments)
        model.model.layers[1].mlp.experts.register_forward_hook(lambda module, args, output: 2 * output)
        return shards

    parallel_plans.spread_experts = spoilt
    return try_types(families, **layout)


def refusals():
    layout = {"expert": 2}
    number = refusal({"num_local_experts": 5}, layout)
    return number, try_layout(["llama"], layout)["llama"].reason, doubled(["mixtral"], layout)["mixtral"].reason


def test_what_would_be_wrong_is_refused():
    """Experts that ranks do not divide, with the numbers that fit; none; a dispatch, by the first wrong parameter."""
    for number, without, wrong in run_ranks(refusals, 2):
        assert (number.where, number.allowed) == ("strategy.expert", "1, 5")
        assert number.found == "2, and 5 experts in model.layers.0.mlp.experts"
        assert number.hint == "strategy.expert=1"
        assert "has no plan by which experts" in without
        assert "does not train over expert ranks as it does on one process" in wrong
        assert "the first that is wrong: model." in wrong
