"""A few of the peaks of docs/plan.md: what a plan says against what the allocator of a real run gave out."""

from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import StrategyConfig
from hfdist.config.task import TaskConfig, TaskName, TeacherSharding
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from proofs import plan_tasks
from proofs.plan_memory import (
    BEGIN,
    BOUND,
    END,
    LAYOUTS,
    Cell,
    Peaks,
    compare,
    compare_run,
    make_table,
    read_table,
    write_table,
)  # fmt: skip
from proofs.plan_tasks import KINDS
from tests.marks import many

pytestmark = pytest.mark.distributed

TEACHER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 257, "pad_token_id": 0}  # fmt: skip
"""As many bytes as all else that the student's step holds."""


@pytest.mark.parametrize(
    ("cell", "bound"),
    [
        many(Cell(family="gpt2", size="activations", layout="single", recomputes=True), 0.01),
        # Copies of weights that autocast keeps would be 6 %.
        many(Cell(family="llama", size="state", layout="single, bf16", recomputes=True), 0.01),
        many(Cell(family="llama", size="state", layout="ddp"), BOUND),
        # Its backward holds most, if the optimizer's step holds no more than shares.
        # Without its buckets of 381 MiB the second rank holds 8 % more than the first.
        many(Cell(family="gpt2", size="state", layout="zero2"), 0.03),
        (Cell(family="llama", size="activations", layout="fsdp2", recomputes=True), 0.01),
        many(Cell(family="llama", size="blocks", layout="fsdp2"), 0.01),
        many(Cell(family="llama", size="blocks", layout="fsdp2 x4"), 0.01),
        many(Cell(family="llama", size="activations", layout="1f1b"), BOUND),
    ],
    ids=lambda value: f"{value.family}, {value.layout}" if isinstance(value, Cell) else "",
)
def test_a_traced_peak_is_the_measured_one(cell, bound):
    assert abs(compare(cell).error) <= bound


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("embed, encoder", "ddp"),
        many("embed, decoder", "fsdp2"),
        many("embed, decoder", "1f1b"),
        many("classify", "ddp"),
        many("mlm", "ddp"),
        many("seq2seq", "fsdp2"),
        many("rerank", "zero3"),
    ],
)
def test_a_step_of_another_task_holds_what_is_planned(kind, layout, tmp_path):
    overrides = [*KINDS[kind].write(tmp_path), *LAYOUTS[layout][1], "train.global_batch_size=16", "train.max_steps=4"]
    # ZeRO-3 is traced as holding more than it does.
    assert abs(compare_run(compose_config(overrides, name="tune"), 2).error) < 0.08


def save_teacher(config, folder):
    """A larger model, with the tokenizer that the run makes of its data."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEACHER))
    model.save_pretrained(folder)
    run.data.tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        many("fsdp2", {}),
        many("ddp", {"teacher_sharding": TeacherSharding.sharded}),
        many("zero3", {}),
        many("1f1b", {}),
        many("fsdp2", {"teacher_top_k": 16}),
        many("1f1b", {"teacher_top_k": 16}),
    ],
)
def test_a_teacher_counts(layout, more, tmp_path, cache_dir):
    """On one process on a CPU its weights are those of the file, mapped: the allocator does not count them."""
    cell = Cell(family="llama", size="activations", layout=layout)
    config, teacher = cell.config(str(tmp_path)), tmp_path / "teacher"
    run_ranks(save_teacher, 1, replace(config, strategy=StrategyConfig()), teacher, group=False)
    config.task = TaskConfig(name=TaskName.distill, teacher=str(teacher), divergence_beta=0.5, temperature=2.0, **more)
    assert abs(compare_run(config, cell.processes).error) < 0.02


def test_the_table_replaces_that_of_the_page(tmp_path):
    page, cell = tmp_path / "plan.md", Cell(family="llama", size="state", layout="ddp")
    page.write_text(f"# Plan\n{BEGIN}\nold\n{END}\nafter\n")
    found = {cell: Peaks(traced=103 * 2**20, measured=100 * 2**20)}
    write_table(page, found)
    assert make_table(found) in page.read_text()
    assert "| llama | state | 103.0 (+3.0%) |" in page.read_text()
    assert "old" not in page.read_text()
    assert make_table(read_table(page)) == make_table(found)
    assert page.read_text().endswith(f"{END}\nafter\n")


def test_a_row_of_a_task_replaces_that_of_the_page(tmp_path):
    page = tmp_path / "plan.md"
    page.write_text(f"# Plan\n{plan_tasks.BEGIN}\nold\n{plan_tasks.END}\nafter\n")
    for kind, layout, planned in (("mlm", "ddp", 2), ("classify", "ddp", 3), ("mlm", "ddp", 4)):
        found = plan_tasks.Found(memory=(planned * 2**20, 2**22), sent={"data": (2**20, 2**20)})
        plan_tasks.write_row(page, plan_tasks.make_row(kind, layout, found))
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith(("| mlm", "| classify"))] == [
        "| classify | ddp | 3.0 / 4.0 (-25.0%) | data 1.00 / 1.00 (+0.0%) |",
        "| mlm | ddp | 4.0 / 4.0 (+0.0%) | data 1.00 / 1.00 (+0.0%) |",
    ]
    assert (lines[0], lines[-1]) == ("# Plan", "after")
