"""Who writes what: every element once, by a rank that has it, evenly, and the same on all ranks."""

import pytest
import torch

from hfdist.checkpoint.piece import NUMBER, STEP, WEIGHT, Piece
from hfdist.checkpoint.regions import CHUNK_BYTES, Region, balance_by_bytes, merge_specs
from hfdist.checkpoint.safetensors_io import TensorSpec
from hfdist.checkpoint.save_plan import Planner, pack_files
from hfdist.errors import CheckpointError, NumericsError
from hfdist.units import list_first
from tests.unit.checkpoint.pieces import plan_writes, whole


def spec(name="w", shape=(10,), dtype="F32"):
    return TensorSpec(name, "weight", shape, dtype)


def region(start, stop, of=None):
    return Region(of or spec(), start, stop)


def loads(declared):
    return [sum(write.region.num_bytes for write in writes) for writes in plan_writes(declared)]


def test_replicas_are_shared_out_evenly_in_runs():
    sizes = [*range(1, 60), 5_000_000]
    declared = [region(0, size, spec(name=f"w{i:02d}", shape=(size,))) for i, size in enumerate(sizes)]
    load = loads([declared] * 3)
    assert max(load) - min(load) <= 2 * 4096
    # All the first rank's bytes lie side by side, and the last tensor has all three writers.
    assert [len(writes) for writes in plan_writes([declared] * 3)] == [60, 1, 1]


def test_ranks_that_hold_other_parts_besides_share_what_they_hold_alike():
    own = [spec(name=f"own{rank}", shape=(100,)) for rank in range(2)]
    shared = spec(name="shared", shape=(4096,))
    declared = [[region(0, 100, own[rank]), region(0, 4096, shared)] for rank in range(2)]
    found = [[(write.region.spec.name, *write.region[1:3]) for write in writes] for writes in plan_writes(declared)]
    assert found == [[("own0", 0, 100), ("shared", 0, 2048)], [("own1", 0, 100), ("shared", 2048, 4096)]]


def test_large_replicas_are_cut_into_runs_that_several_ranks_can_verify():
    large = spec(shape=(2**26,))
    sizes = [[write.region.num_bytes for write in of_rank] for of_rank in plan_writes([[region(0, 2**26, large)]] * 2)]
    assert sizes == [[CHUNK_BYTES] * 2] * 2


def test_numbers_may_be_of_several_types():
    numbers = [spec("w", shape=(), dtype=dtype)._replace(key=NUMBER + "d") for dtype in ("I64", "F64")]
    assert list(merge_specs(Region(number, 0, 1) for number in numbers)) == [numbers[0].id]


@pytest.mark.parametrize(("key", "value", "told"), [(NUMBER + "d", "nan", "NaN"), (STEP, "inf", "infinite")])
def test_a_number_that_is_not_finite_is_told_as_what_it_is(key, value, told):
    number = whole("w", key, torch.tensor(float(value), dtype=torch.float64))
    with pytest.raises(NumericsError, match=rf"is {told}[\s\S]*w/{key.removeprefix(NUMBER)}"):
        Planner().plan([whole("w", WEIGHT, torch.ones(2)), number])


def test_a_plan_that_fails_leaves_the_one_before():
    planner, weight = Planner(), whole("w", WEIGHT, torch.ones(2))
    numbers = planner.plan([weight, whole("w", STEP, torch.tensor(7.0))])[2]
    with pytest.raises(CheckpointError):
        planner.plan([weight, Piece(name="v", key=WEIGHT, shape=(4,), start=0, view=torch.ones(2))])
    assert planner.plan([weight, whole("w", STEP, torch.tensor(7.0))])[2] == numbers == {STEP: {"w": 7}}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([[region(0, 3)], [region(5, 9)]], r"w/weight\[3:5\], w/weight\[9:10\]"),
        ([[region(0, 10)], [region(0, 10, spec(shape=(11,)))]], r"w/weight.*\n.*F32\[10\] and F32\[11\]"),
        ([[region(5, 11)]], r"\[5, 11\) of 10"),
    ],
)
def test_gaps_and_ranks_that_disagree_are_named(declared, message):
    with pytest.raises(CheckpointError, match=message):
        plan_writes(declared)


def test_files_depend_on_names_and_sizes_alone():
    tensors = [spec(name=name, shape=(size,)) for name, size in (("c", 3), ("a", 5), ("b", 100), ("d", 2))]
    for order in (tensors, tensors[::-1]):
        assert [[t.name for t in file] for file in pack_files(order, limit_bytes=20)] == [["a"], ["b"], ["c", "d"]]
    assert pack_files([], limit_bytes=20) == [[]]


def test_items_are_shared_out_by_size():
    sizes = {"large": 100, "b": 60, "c": 50, "d": 1}
    shares = balance_by_bytes([(name, size, range(2)) for name, size in sizes.items()], 2)
    assert [sorted(share) for share in shares] == [["d", "large"], ["b", "c"]]
    assert balance_by_bytes([("only", 1, range(3))], 3) == [["only"], [], []]


def test_long_lists_are_shortened():
    assert list_first(["a", "b", "c", "d", "e", "f", "g"]) == "a, b, c, d, e, and 2 more"
    assert list_first(["a", "b"]) == "a, b"
