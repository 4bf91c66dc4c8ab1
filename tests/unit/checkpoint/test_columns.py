"""Pieces of columns, of packed matrices and of rows within them: each element is written once, and read where it is."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.checkpoint import regions, safetensors_io
from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.checkpoint.regions import Region
from hfdist.checkpoint.safetensors_io import TensorSpec
from hfdist.checkpoint.save_plan import _Sources, regions_of
from hfdist.errors import CheckpointError
from hfdist.strategies.parameter_shards import ParameterShard
from tests.unit.checkpoint.pieces import plan_writes


@st.composite
def layouts(draw):
    """A shape, and the pieces of all ranks: sharded over tensor ranks, and rows of that over shards and replicas."""
    num_tensor, num_packed = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    part = shape[dim]
    shape[dim] *= num_tensor * num_packed
    whole = torch.arange(math.prod(shape)).view(shape)
    num_shards, num_replicas = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    by_rank = []
    for _ in range(num_replicas):
        for shard in range(num_shards):
            for rank in range(num_tensor):
                begins = [(packed * num_tensor + rank) * part for packed in range(num_packed)]
                parts = tuple((begin, begin + part) for begin in begins)
                of_rank = ParameterShard(shape=tuple(shape), dim=dim, parts=parts)
                held = torch.cat([whole.narrow(dim, begin, part) for begin in begins], dim)
                assert tuple(held.shape) == of_rank.local_shape
                # As FSDP2 has it: equally many rows for each, the last ones with fewer or none.
                size = -(-len(held) // num_shards)
                first = min(shard * size, len(held))
                rows = held[first : first + size]
                start = first * math.prod(of_rank.local_shape[1:])
                own = Piece(name="w", key=WEIGHT, shape=of_rank.local_shape, start=start, view=rows)
                by_rank.append(list(of_rank.pieces(own)) if draw(st.integers(0, 9)) else [of_rows(whole, first)])
    return whole, by_rank


def of_rows(whole, first):
    """A rank that holds any contiguous run, beside those that hold columns."""
    flat = whole.reshape(-1)
    start = min(first, flat.numel() - 1)
    return Piece(name="w", key=WEIGHT, shape=tuple(whole.shape), start=start, view=flat[start:].clone())


@settings(max_examples=300, deadline=None)
@given(layouts(), st.integers(1, 64))
def test_every_element_is_written_once_from_a_rank_that_holds_it(layout, chunk_bytes):
    whole, by_rank = layout
    declared = [regions_of(pieces) for pieces in by_rank]
    held = torch.zeros(whole.numel())
    for piece in (piece for pieces in by_rank for piece in pieces):
        held[piece.view.reshape(-1)] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "CHUNK_BYTES", chunk_bytes)
        if not held.all():
            with pytest.raises(CheckpointError, match="no rank holds"):
                plan_writes(declared)
            return
        writes = plan_writes(declared)
    written = torch.full((whole.numel(),), -1)
    for writer, segments in enumerate(writes):
        for segment in segments:
            band = written[segment.region.start : segment.region.stop].view(segment.num_rows, segment.pitch)
            for column in segment.columns:
                sender = column.sender(writer)
                sources = _Sources(declared[sender])
                sources.add(segment, column)
                [source] = sources.found
                place = band[:, column.start : column.stop]
                assert (place == -1).all()
                place.copy_(source.of(by_rank[sender][source.piece]).view(place.shape))
    assert torch.equal(written, whole.reshape(-1))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_pieces_are_of_the_whole(layout):
    whole, by_rank = layout
    for piece in (piece for pieces in by_rank for piece in pieces):
        assert torch.equal(piece.of_whole(whole), piece.view)
        assert piece.total == whole.numel()


@settings(max_examples=100, deadline=None)
@given(layouts(), st.sampled_from([8, 40, 2**20]), st.sampled_from([24, 64 * 2**20]))
def test_pieces_are_read_from_a_file(tmp_path_factory, layout, long_bytes, copy_bytes):
    whole, by_rank = layout
    path = tmp_path_factory.mktemp("file") / "data"
    path.write_bytes(b"head" + whole.numpy().tobytes())
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(safetensors_io, "LONG_BYTES", long_bytes)
        patch.setattr(safetensors_io, "COPY_BYTES", copy_bytes)
        for piece in (piece for pieces in by_rank for piece in pieces):
            read = torch.full((piece.view.numel(),), -1)
            begin = 4 + piece.start * 8
            safetensors_io.read_elements(file.fileno(), begin, torch.int64, read, piece.run, piece.pitch)
            assert torch.equal(read.view(piece.view.shape), piece.view)
            assert os.fstat(file.fileno()).st_size >= begin


SPEC = TensorSpec("w", WEIGHT, (4, 6), "F32")


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Region(SPEC, 4, 24, run=4, pitch=6), "no columns"),
        (Region(SPEC, 0, 20, run=2, pitch=7), "no columns"),
        (Region(SPEC, 0, 21, run=2, pitch=6), "no columns"),
    ],
)
def test_runs_that_are_no_columns_are_refused(region, message):
    with pytest.raises(CheckpointError, match=message):
        plan_writes([[region], [Region(SPEC, 0, 24)]])


def test_ranks_that_see_other_matrices_are_refused():
    with pytest.raises(CheckpointError, match="columns of different matrices"):
        plan_writes([[Region(SPEC, 0, 20, run=2, pitch=6)], [Region(SPEC, 0, 14, run=2, pitch=12)]])
