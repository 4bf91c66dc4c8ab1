"""A few of the peaks of docs/plan.md: what a plan says against what the allocator of a real run gave out."""

import pytest

from tests.distributed.plan_memory import BEGIN, BOUND, END, Cell, Peaks, compare, make_table, write_table

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "cell",
    [
        Cell(family="gpt2", size="activations", layout="single", recomputes=True),
        Cell(family="llama", size="state", layout="ddp"),
        Cell(family="llama", size="state", layout="fsdp2"),
        Cell(family="llama", size="activations", layout="1f1b"),
    ],
    ids=lambda cell: f"{cell.family}, {cell.layout}",
)
def test_a_traced_peak_is_the_measured_one(cell):
    assert abs(compare(cell).error) <= BOUND


def test_the_table_replaces_that_of_the_page(tmp_path):
    page, cell = tmp_path / "plan.md", Cell(family="llama", size="state", layout="ddp")
    page.write_text(f"# Plan\n{BEGIN}\nold\n{END}\nbehind\n")
    found = {cell: Peaks(traced=103 * 2**20, measured=100 * 2**20)}
    write_table(page, found)
    assert make_table(found) in page.read_text()
    assert "| llama | state | 103.0 (+3.0%) |" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith(f"{END}\nbehind\n")
