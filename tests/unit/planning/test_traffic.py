"""What a rank sends, in closed form: by layout, by hardware, and fast enough for a search."""

import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import Sharding
from hfdist.config.train import Precision, TrainConfig
from hfdist.planning import make_plan
from hfdist.planning.timing.traffic import step_sizes, traffic
from hfdist.sent_bytes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from hfdist.strategies.traffic import Phase, cut_elements
from tests.unit.planning.layouts import make_layout

FIELDS = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip


def make_model(kind="llama", **fields):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **FIELDS | fields))


@pytest.fixture(scope="module")
def llama():
    return make_model()


def layout(world_size, *, num_microbatches=2, precision=Precision.fp32, **keys):
    return make_layout(world_size, TrainConfig(precision=precision), num_microbatches=num_microbatches, **keys)


def by_axis(model, strategy, *, per_machine=8, **of_step):
    train = TrainConfig(**of_step)
    sizes = step_sizes(model, train, tensor=strategy.topology.tensor, is_gpu=True)
    sent = traffic(strategy, sizes, devices_per_machine=per_machine)
    return {axis: sum(one.sent_bytes for one in sent if one.axis == axis) for axis in {one.axis for one in sent}}, sent


def test_one_process_sends_nothing(llama):
    assert by_axis(llama, layout(1))[1] == ()


def test_gradients_travel_once_and_shards_with_each_micro_batch(llama):
    parameters = sum(p.numel() for p in llama.parameters())
    sent, [one] = by_axis(llama, layout(4))
    assert sent == {"data": pytest.approx(2 * 3 / 4 * 4 * parameters)}
    assert one.overlaps is Phase.backward
    assert one.microbatches == 1
    twice, fourfold = (
        by_axis(llama, layout(4, sharding=Sharding.fsdp2, num_microbatches=number))[0]["data"] for number in (2, 4)
    )
    assert fourfold == pytest.approx(2 * twice)
    kept = by_axis(llama, layout(4, sharding=Sharding.fsdp2, reshard=False))[0]["data"]
    assert kept < 0.75 * twice


def test_half_precision_halves_what_deepspeed_sends(llama):
    full = by_axis(llama, layout(4, sharding=Sharding.zero3))[0]["data"]
    half = by_axis(llama, layout(4, sharding=Sharding.zero3, precision=Precision.bf16))[0]["data"]
    assert half == pytest.approx(full / 2)


def test_what_blocks_exchange_is_exchanged_again_where_they_are_computed_again(llama):
    for keys in ({"tensor": 2}, {"context": 2}):
        [axis] = keys
        once = by_axis(llama, layout(2, **keys))[0][axis]
        again = by_axis(llama, layout(2, **keys), gradient_checkpointing=True)[0][axis]
        assert 1.3 < again / once < 1.55


def test_each_sum_of_shared_tokens_is_waited_for_as_two_halves(llama):
    whole, shared = (
        {kind: sum(one.calls for one in sent if one.kind == kind) for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)}
        for _, sent in (by_axis(llama, layout(2, tensor=2, sequence=is_shared)) for is_shared in (False, True))
    )
    # One is that of the gradients of norms.
    sums = 1 + 2 * 2 * FIELDS["num_hidden_layers"] * 2
    assert whole == {ALL_REDUCE: sums, ALL_GATHER: 0, REDUCE_SCATTER: 0}
    assert shared[REDUCE_SCATTER] == sums - 1
    # What a module has read is gathered once more in its backward.
    assert shared[ALL_GATHER] == 1.5 * (sums - 1)
    assert shared[ALL_REDUCE] < sums / 2


def test_lora_sends_no_gradients_of_what_is_frozen(llama):
    model = make_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    next(iter(model.parameters())).requires_grad_(True)
    share = next(iter(model.parameters())).numel() / sum(p.numel() for p in model.parameters())
    assert by_axis(model, layout(2))[0]["data"] == pytest.approx(share * by_axis(llama, layout(2))[0]["data"], rel=0.01)


@pytest.mark.parametrize("asked", [("adapter=lora", "adapter.merge=false"), ("train.train_only=[*norm*]",)])
def test_a_plan_knows_what_is_trained(asked):
    config = compose_config(["model=tiny", *asked])
    architecture = AutoConfig.for_model("llama", **config.model.config)
    model = make_plan._measure_model(config, architecture, is_gpu=False)
    whole = make_plan._measure_model(compose_config(["model=tiny"]), architecture, is_gpu=False)
    assert 0 < model.sizes.trained_share < 0.1
    # A backward needs the gradient of what a frozen weight reads, and not that of the weight.
    assert 2 / 3 < model.flops / whole.flops < 0.85


def test_machines_are_full_of_neighbours(llama):
    strategy = layout(64, tensor=4, pipeline=2, sharding=Sharding.fsdp2, replicate=2)
    _, sent = by_axis(llama, strategy)
    places = {one.axis: (one.size, one.crosses_machines, one.machine_ranks) for one in sent}
    assert places == {
        "tensor": (4, False, 4),
        "shard": (4, True, 2),
        "replicate": (2, True, 1),
        "pipeline": (2, True, 1),
    }


def test_experts_are_exchanged_and_their_gradients_stay_with_those_who_have_them():
    model = make_model("mixtral", intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    sent, _ = by_axis(model, layout(2, expert=2))
    tokens = 2 * 64
    assert sent["expert"] == pytest.approx(0.5 * 4 * tokens * 2 * 128 * 4 * 4)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    parameters = sum(p.numel() for p in model.parameters())
    assert sent["data"] == pytest.approx(4 * (parameters - experts))


def test_what_is_cut_is_counted_also_where_a_parameter_has_no_elements():
    assert cut_elements((0,), 2) == 0
    assert cut_elements((4, 0, 2), 2) == 4


def test_a_search_can_call_it_thousands_of_times(llama):
    sizes = step_sizes(llama, TrainConfig(), tensor=4)
    begin = time.process_time()
    for _ in range(300):
        strategy = layout(1024, tensor=4, pipeline=8, sharding=Sharding.fsdp2, num_microbatches=32)
        traffic(strategy, sizes, devices_per_machine=8)
    assert time.process_time() - begin < 0.3
