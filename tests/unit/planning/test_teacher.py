"""A plan of a distillation has its teacher: memory and operations of its trace, of formulas, and what ranks gather."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.config.hardware import read_hardware
from hfdist.config.layout import Layout
from hfdist.errors import ConfigError
from hfdist.models.architecture import find_architecture
from hfdist.planning.describe import describe_plan
from hfdist.planning.make_plan import make_plan
from hfdist.planning.searching.evaluate import Evaluator, Machines
from hfdist.planning.searching.search import measure
from hfdist.planning.tracing.memory import trace_rank
from tests.marks import many
from tests.worst_rank import worst_rank

LENGTH, MICRO_BATCH = 128, 2
STUDENT = "{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 1024}"
COMMON = (
    "model=tiny",
    "model.loss=chunked",
    "data=README.md",
    "data.packing=best_fit",
    f"data.sequence_length={LENGTH}",
    f"model.config={STUDENT}",
    "train.global_batch_size=8",
    f"train.micro_batch_size={MICRO_BATCH}",
    "train.epochs=null",
    "train.max_steps=10",
    "data.lanes=8",
)
MACHINES = Machines(hardware=read_hardware("h100_80gb"), usable_bytes=2.0**35)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, vocab_size=1030, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def configs(teacher, *overrides):
    """Of a distillation, and of next tokens."""
    own = ["task=distill", f"task.teacher={teacher}"]
    layout = [one for one in overrides if not one.startswith("task.")]
    return [compose_config([*COMMON, *own, *overrides], name="tune"), compose_config([*COMMON, *layout])]


def of_teacher(teacher):
    """Bytes of its weights, and FLOPs of a forward of one sequence."""
    # The other kind of attention is not counted on a CPU.
    model = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros((1, LENGTH), dtype=torch.int64), use_cache=False)
    return sum(p.nbytes for p in model.parameters()), counter.get_total_flops()


@pytest.mark.parametrize(
    ("layout", "num_ranks", "num_shares"),
    [
        many("single", 1, 1),
        many("ddp", 2, 1),
        many("ddp task.teacher_sharding=sharded", 2, 2),
        many("fsdp2", 2, 2),
        many("zero3", 2, 2),
        many("tensor", 2, 2),
        ("pipeline", 2, 1),
        many("ddp task.teacher_top_k=8", 2, 0),
    ],
)
def test_a_trace_has_the_teacher(teacher, layout, num_ranks, num_shares):
    """`num_shares`: ranks that share it; 0: it is not there."""
    traces = [
        trace_rank(
            config, find_architecture(config.model, sequence_length=LENGTH), world_size=num_ranks, rank=num_ranks - 1
        )
        for config in configs(teacher, *f"strategy={layout}".split())
    ]
    num_bytes, flops = of_teacher(teacher)
    weights = [trace.state.weights for trace in traces]
    assert weights[0] - weights[1] == pytest.approx(num_bytes / num_shares if num_shares else 0, rel=0.01, abs=1)
    forwards = [sum(stage.forward.flops for stage in trace.costs.stages) for trace in traces]
    # Of the head, only targets are asked for.
    wanted = MICRO_BATCH * flops if num_shares else 0
    assert forwards[0] - forwards[1] == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("more", [(), many(("task.teacher_sharding=whole",)), many(("task.teacher_top_k=8",))])
def test_formulas_are_near_the_trace(teacher, more):
    config, _ = configs(teacher, "strategy=fsdp2", *more)
    architecture = find_architecture(config.model, sequence_length=LENGTH)
    evaluator = Evaluator(config, measure(config, architecture, MACHINES, processes=2, as_asked=True), MACHINES)
    layout = Layout.of(config, 2, 1)
    found = evaluator.evaluate(layout)
    traced = worst_rank(config, architecture, world_size=2, device_type="cuda").peak.use
    assert found.memory.use.total == pytest.approx(traced.total, rel=0.15)
    assert found.memory.use.weights == pytest.approx(traced.weights, rel=0.02)
    # The least of all ways to shard is less than any of them.
    assert evaluator.least_bytes(layout) <= found.memory.use.total


def test_a_plan_says_what_is_gathered_and_kept(teacher):
    config, plain = configs(teacher, "strategy=ddp", "task.teacher_sharding=sharded")
    plan, without = (make_plan(one, MACHINES, 2) for one in (config, plain))
    num_bytes = of_teacher(teacher)[0]
    assert plan.memory.use.weights - without.memory.use.weights == pytest.approx(num_bytes / 2, rel=0.01)
    sent = [sum(one.sent_bytes for one in own.traffic) for own in (plan, without)]
    # To one other rank, for each of two micro batches.
    assert sent[0] - sent[1] == pytest.approx(2 * num_bytes / 2, rel=0.01)
    assert plan.time.seconds > without.time.seconds
    kept = make_plan(configs(teacher, "strategy=ddp", "task.teacher_top_k=8")[0], MACHINES, 2)
    # The teacher is not there, and what is kept of it comes with a batch.
    assert kept.memory.use.weights == without.memory.use.weights
    assert kept.kept_bytes_per_step == 8 * LENGTH * (8 * 8 + 4)
    assert "at most, of the teacher's likeliest tokens, for all steps" in describe_plan(kept)


def test_a_folder_without_a_teacher_is_refused(tmp_path):
    config, _ = configs(tmp_path, "strategy=ddp")
    with pytest.raises(ConfigError, match="holds no such model"):
        make_plan(config, MACHINES, 2)
