"""What a step holds, operation by operation: on fake tensors as on real ones, and in any layout."""

import gc
import inspect

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from hfdist.config.composition.compose import compose_config
from hfdist.models import find_architecture
from hfdist.planning.tracing.memory import trace_rank
from hfdist.planning.tracing.trace import GRADIENTS, WEIGHTS, Trace
from hfdist.strategies.traffic import Phase
from tests.unit.tiny import llama
from tests.worst_rank import worst_rank

MIB = 2**20


def step(model, trace):
    """Run one, and give the peaks of its phases."""
    trace.hold(model.parameters(), WEIGHTS)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: trace.hold([p.grad], GRADIENTS))
    optimizer = torch.optim.AdamW(model.parameters())
    with trace:
        ids = torch.zeros((2, 32), dtype=torch.int64)
        loss = model(input_ids=ids, labels=ids, position_ids=torch.arange(32).repeat(2, 1)).loss
        trace.phase = Phase.backward
        loss.backward()
        trace.phase = Phase.optimizer
        optimizer.step()
    return [trace.peak_of(phase) for phase in Phase], [trace.costs(phase) for phase in Phase]


def test_what_a_circle_holds_does_not_depend_on_the_garbage_collector():
    trace, threshold = Trace(), gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with trace:
            circle = [torch.zeros(2**20)]
            circle.append(circle)
            del circle
            others = [[number] for number in range(1000)]
            assert trace.held.activations == 4 * MIB
        assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
    assert len(others) == 1000


def test_fake_tensors_hold_and_cost_what_real_ones_do():
    real = step(llama(), Trace())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert step(llama(), Trace()) == real


def test_a_storage_counts_until_nothing_refers_to_it():
    trace = Trace()
    with trace:
        kept = torch.zeros(MIB // 4)
        view = kept[:10]
        gone = torch.zeros(2 * MIB // 4)
        del gone, kept
        assert trace.held.total == MIB
        del view
        assert trace.held.total == 0
    assert trace.peak.use.activations == 3 * MIB


def test_a_storage_that_is_resized_counts_as_a_buffer():
    trace = Trace()
    resize = torch.UntypedStorage.resize_
    with trace:
        gathered = torch.zeros(MIB // 4)
        gathered.untyped_storage().resize_(0)
        assert trace.held.total == 0
        gathered.untyped_storage().resize_(MIB)
        assert trace.held.buffers == MIB
    assert torch.UntypedStorage.resize_ is resize


def test_autograd_adds_gradients_in_place():
    with FakeTensorMode():
        used_twice = torch.zeros(MIB // 4, requires_grad=True)
        trace = Trace()
        trace.hold([used_twice], WEIGHTS)
        with trace:
            loss = (used_twice * 2).sum() + (used_twice * 3).sum()
            trace.forget_peak()
            loss.backward()
    # The weight, and the gradients of its two uses.
    assert trace.peak.use.total == pytest.approx(3 * MIB, rel=1e-3)


def test_products_are_counted_as_flops_and_the_rest_as_bytes():
    trace = Trace()
    with FakeTensorMode(), trace:
        left, right = torch.empty(8, 16), torch.empty(16, 4)
        product = left @ right
        product.view(-1)
        product.add(1)
    costs = trace.costs(Phase.forward)
    assert (costs.flops, costs.moved_bytes, costs.kernels) == (2 * 8 * 16 * 4, 2 * product.nbytes, 2)


def test_what_reads_only_a_shape_moves_what_it_writes_and_another_shape_moves_nothing():
    with FakeTensorMode(), Trace() as trace:
        rows, weight = torch.empty(2, 8, 16), torch.empty(4, 16)
        # Rows of three dimensions are multiplied as two, and what comes gets its shape by an operation that is no view.
        product = rows @ weight.T
        assert trace.costs(Phase.forward).moved_bytes == 0
        filled = torch.zeros_like(product)
    assert trace.costs(Phase.forward).moved_bytes == filled.nbytes


def _counted(operate):
    # Whole numbers are computed for real.
    with FakeTensorMode(allow_non_fake_inputs=True), Trace() as trace:
        table, places = torch.empty(1000, 16), torch.zeros(4, 16, dtype=torch.int64)
        before = trace.costs(Phase.forward).moved_bytes
        operate(table, places)
    return trace.costs(Phase.forward).moved_bytes - before


def test_only_elements_that_are_read_or_written_count():
    row, values, places = 16 * 4, 4 * 16 * 4, 4 * 16 * 8
    assert _counted(lambda table, at: table.gather(0, at)) == 2 * values + places
    assert _counted(lambda table, at: table[at[:, 0]]) == 2 * values + places // 16
    # Read, added to, and written.
    assert _counted(lambda table, at: table.scatter_add_(0, at, torch.empty(4, 16))) == 3 * values + places
    # An expanded row is one.
    assert _counted(lambda table, at: table[:1].expand(1000, 16).clone()) == row + 1000 * row


def test_a_product_that_is_added_in_place_has_flops():
    with FakeTensorMode(), Trace() as trace:
        torch.empty(8, 4).addmm_(torch.empty(8, 16), torch.empty(16, 4))
    assert (trace.costs(Phase.forward).flops, trace.costs(Phase.forward).moved_bytes) == (2 * 8 * 16 * 4, 0)


def test_the_bytes_of_a_fused_optimizer_are_counted():
    # It gives nothing back: weights, both moments and gradients are read, and written or seen as such.
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.zeros(MIB // 4))
        optimizer = torch.optim.AdamW([weight], fused=True)
        trace = Trace()
        trace.phase = Phase.optimizer
        with trace:
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            before = trace.costs(Phase.optimizer).moved_bytes
            optimizer.step()
    moved = trace.costs(Phase.optimizer).moved_bytes - before
    assert 7 * MIB <= moved <= 9 * MIB


def test_rows_chosen_by_a_known_mask_have_a_number():
    labels = torch.tensor([1, -100, 2])
    with FakeTensorMode(allow_non_fake_inputs=True), Trace():
        assert torch.empty(3, 4)[labels != -100].shape == (2, 4)


def test_what_is_used_of_torch_is_there():
    assert torch._C._current_graph_task_id() == -1
    assert list(inspect.signature(unset_fake_temporarily).parameters) == []
    assert "allow_non_fake_inputs" in inspect.signature(FakeTensorMode.__init__).parameters
    assert inspect.isclass(FakeStore)


SMALL = (
    "model=tiny",
    "model.config.vocab_size=256",
    "data.sequence_length=64",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
)


def trace(*overrides, world_size=1, rank=0):
    config = compose_config([*SMALL, *overrides])
    architecture = find_architecture(config.model, sequence_length=64)
    return trace_rank(config, architecture, world_size=world_size, rank=rank)


def test_state_is_what_formulas_say():
    alone = trace().state
    assert alone.optimizer == pytest.approx(2 * alone.weights, rel=0.01)
    assert alone.gradients == pytest.approx(alone.weights, rel=0.01)
    sharded = trace("strategy=fsdp2", world_size=8).state
    assert sharded.weights == pytest.approx(alone.weights / 8, rel=0.05)
    assert sharded.optimizer == pytest.approx(alone.optimizer / 8, rel=0.05)
    # One micro batch a rank: between steps there are none.
    assert sharded.gradients == 0


def test_recomputing_holds_less():
    plain, less = trace().peak.use, trace("train.gradient_checkpointing=true").peak.use
    assert less.activations < 0.8 * plain.activations
    assert less.weights == plain.weights


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["strategy=ddp"], 2),
        (["strategy=hsdp"], 4),
        (["strategy.tensor=2"], 2),
        (["strategy.context=4"], 4),
        (["adapter=lora", "adapter.merge=false"], 1),
        (["strategy=ddp", "train.precision=bf16"], 2),
    ],
)
def test_no_layout_leaves_a_process_group_behind(overrides, world_size):
    assert trace(*overrides, world_size=world_size, rank=world_size - 1).peak.use.total > 0
    assert not dist.is_initialized()


def test_a_real_group_can_follow(tmp_path):
    trace("strategy=fsdp2", world_size=4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "adapter", [(), ("adapter=lora", "adapter.target_parts=[experts]", "adapter.rank=64")], ids=["whole", "lora"]
)
def test_experts_that_ranks_share(adapter):
    experts = ["model.type=qwen3_moe", "model.config.num_experts=4", "model.config.num_experts_per_tok=2", *adapter]
    alone = trace(*experts).state
    shared = trace(*experts, "strategy=ddp", "strategy.expert=2", world_size=2).state
    own = trace(*experts, "strategy=moe", world_size=2).state
    assert own.weights == pytest.approx(alone.weights / 2, rel=0.05)
    if adapter:
        # Nothing else has a state of the optimizer.
        assert shared.optimizer == pytest.approx(alone.optimizer / 2, rel=0.01)


def test_the_worst_rank_is_looked_for_among_those_that_differ():
    config = compose_config([*SMALL, "strategy=fsdp2"])
    architecture = find_architecture(config.model, sequence_length=64)
    assert worst_rank(config, architecture, world_size=8).peak.rank == 0


def traced_loss(name, device_type):
    """Of a step with this `model.loss`."""
    config = compose_config(["model=tiny", "strategy=single", f"model.loss={name}", "data.sequence_length=64"])
    architecture = find_architecture(config.model, sequence_length=64)
    return trace_rank(config, architecture, world_size=1, rank=0, device_type=device_type)
