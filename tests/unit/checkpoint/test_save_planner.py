"""Who writes what: every element once, by a rank that has it, evenly, and the same on all ranks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.checkpoint.save_planner import (
    CHUNK_BYTES,
    Region,
    TensorSpec,
    assign_writers,
    pack_files,
    share_out,
    shorten,
)
from hfdist.errors import CheckpointError


def spec(name="w", shape=(10,), dtype="F32", itemsize=4):
    return TensorSpec(name=name, key="weight", shape=shape, dtype=dtype, itemsize_bytes=itemsize)


def region(start, stop, of=None):
    return Region(spec=of or spec(), start=start, stop=stop)


regions = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(regions, min_size=1, max_size=5))
def test_every_element_has_one_writer_that_holds_it(by_rank):
    tensor = spec(shape=(5, 6))
    declared = [[region(start, stop, tensor) for start, stop in rank] for rank in by_rank]
    held = [{e for start, stop in rank for e in range(start, stop)} for rank in by_rank]
    everything = set().union(*held)
    if not any(declared):
        assert assign_writers(declared) == []
    elif everything != set(range(30)):
        with pytest.raises(CheckpointError, match="no rank holds"):
            assign_writers(declared)
    else:
        written = Counter()
        for assignment in assign_writers(declared):
            elements = range(assignment.start, assignment.stop)
            assert held[assignment.writer].issuperset(elements)
            # Within one region of its writer, so that it can be written from one view.
            assert any(s <= assignment.start and assignment.stop <= e for s, e in by_rank[assignment.writer])
            written.update(elements)
        assert written == Counter(range(30))


def test_replicas_are_shared_out_evenly():
    sizes = [*range(1, 60), 300]
    declared = [[region(0, size, spec(name=f"w{i}", shape=(size,))) for i, size in enumerate(sizes)]] * 3
    load = Counter()
    for assignment in assign_writers(declared):
        load[assignment.writer] += assignment.num_bytes
    assert max(load.values()) - min(load.values()) < 0.02 * max(load.values())


def test_one_huge_replica_has_many_writers():
    size = 10 * CHUNK_BYTES
    huge = spec(shape=(size,), dtype="U8", itemsize=1)
    assignments = assign_writers([[region(0, size, huge)]] * 4)
    load = Counter()
    for assignment in assignments:
        load[assignment.writer] += assignment.num_bytes
    assert sum(load.values()) == size
    assert max(load.values()) == 3 * CHUNK_BYTES


def test_those_who_must_write_get_less_of_what_anybody_could():
    own, shared = spec(name="own", shape=(100,)), spec(name="shared", shape=(100,))
    declared = [[region(0, 100, own), region(0, 100, shared)], [region(0, 100, shared)]]
    assert {a.spec.name: a.writer for a in assign_writers(declared)} == {"own": 0, "shared": 1}


def test_gaps_are_named():
    with pytest.raises(CheckpointError, match=r"w/weight\[3:5\], w/weight\[9:10\]"):
        assign_writers([[region(0, 3)], [region(5, 9)]])


def test_ranks_that_disagree_are_named():
    with pytest.raises(CheckpointError, match=r"w/weight.*\n.*F32\[10\] and F32\[11\]"):
        assign_writers([[region(0, 10)], [region(0, 10, spec(shape=(11,)))]])
    with pytest.raises(CheckpointError, match=r"\[5, 11\) of 10"):
        assign_writers([[region(5, 11)]])


def test_regions_travel_as_lists():
    original = region(2, 7, spec(shape=(2, 5)))
    assert Region.from_json(original.to_json()) == original


def test_files_depend_on_names_and_sizes_alone():
    tensors = [spec(name=name, shape=(size,)) for name, size in (("c", 3), ("a", 5), ("b", 100), ("d", 2))]
    expected = [["a"], ["b"], ["c", "d"]]
    for order in (tensors, tensors[::-1]):
        assert [[t.name for t in file] for file in pack_files(order, limit_bytes=20)] == expected
    assert pack_files([], limit_bytes=20) == [[]]


def test_files_are_dealt_out_by_size():
    shares = share_out({"large": 100, "b": 60, "c": 50, "d": 1}, 2)
    assert [sorted(share) for share in shares] == [["d", "large"], ["b", "c"]]
    assert share_out({"only": 1}, 3) == [["only"], [], []]


def test_long_lists_are_cut():
    assert shorten("abcdefg") == "a, b, c, d, e, and 2 more"
    assert shorten("ab") == "a, b"
