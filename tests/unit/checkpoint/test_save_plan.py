"""Who writes what: every element once, by a rank that has it, evenly, and the same on all ranks."""

import pytest

from hfdist.checkpoint.regions import CHUNK_BYTES, Region, assign_writers, balance_by_bytes, list_first
from hfdist.checkpoint.safetensors_io import TensorSpec
from hfdist.checkpoint.save_plan import pack_files
from hfdist.errors import CheckpointError


def spec(name="w", shape=(10,), dtype="F32"):
    return TensorSpec(name, "weight", shape, dtype)


def region(start, stop, of=None):
    return Region(of or spec(), start, stop)


def loads(declared):
    return [sum(write.region.num_bytes for write in writes) for writes in assign_writers(declared)]


def test_replicas_are_shared_out_evenly():
    sizes = [*range(1, 60), 300]
    load = loads([[region(0, size, spec(name=f"w{i}", shape=(size,))) for i, size in enumerate(sizes)]] * 3)
    assert max(load) - min(load) < 0.02 * max(load)


def test_one_huge_replica_has_many_writers():
    size = 10 * CHUNK_BYTES
    load = loads([[region(0, size, spec(shape=(size,), dtype="U8"))]] * 4)
    assert sum(load) == size
    assert max(load) == 3 * CHUNK_BYTES


def test_those_who_must_write_get_less_of_what_anybody_could():
    own, shared = spec(name="own", shape=(100,)), spec(name="shared", shape=(100,))
    declared = [[region(0, 100, own), region(0, 100, shared)], [region(0, 100, shared)]]
    assert [[write.region.spec for write in writes] for writes in assign_writers(declared)] == [[own], [shared]]


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
        assign_writers(declared)


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
