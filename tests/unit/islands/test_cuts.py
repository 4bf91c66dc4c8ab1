"""Parts of pieces: each element is in one part, at its place in the whole tensor."""

import pytest
import torch

from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.islands import cuts
from hfdist.islands.cuts import cut, cut_values

WHOLE = torch.arange(12 * 10.0).view(12, 10)


def piece(name, start, view, **more):
    return Piece(name=name, key=WEIGHT, shape=(12, 10), start=start, view=view, **more)


PIECES = [
    piece("whole", 0, WHOLE),
    piece("rows", 30, WHOLE[3:11]),
    piece("columns", 14, WHOLE[1:, 4:7].contiguous(), run=3, pitch=10),
    piece("small", 7, WHOLE.view(-1)[7:9]),
    piece("wide", 0, WHOLE.view(2, 60)[:, :50].contiguous(), run=50, pitch=60),
]


OF_32 = [[32, 32, 32, 24], [32, 32, 16], [30, 3], [2], [50, 50]]
"""Sizes of parts of at most 32 elements; a run of 3 or 50 is not cut."""


@pytest.mark.parametrize(("most", "sizes"), [(2**22, [[120], [80], [33], [2], [100]]), (32, OF_32)])
def test_parts_hold_what_the_whole_tensor_has_at_their_places(most, sizes, monkeypatch):
    monkeypatch.setattr(cuts, "CUT_ELEMENTS", most)
    by_piece = [cut([one]) for one in PIECES]
    assert [[part.view.numel() for part in parts] for parts in by_piece] == sizes
    for whole, parts in zip(PIECES, by_piece, strict=True):
        assert all(torch.equal(part.view, part.of_whole(WHOLE)) for part in parts)
        assert torch.equal(torch.cat([part.view for part in parts]), whole.view.reshape(-1))
        assert all((part.name, part.shape) == (whole.name, whole.shape) for part in parts)


def test_values_are_cut_as_live_views(monkeypatch):
    monkeypatch.setattr(cuts, "CUT_ELEMENTS", 32)
    values = [torch.zeros(one.view.numel()) for one in PIECES]
    for part, view in zip(cut(PIECES), cut_values(PIECES, values), strict=True):
        view.copy_(part.view)
    assert all(torch.equal(value, one.view.reshape(-1)) for value, one in zip(values, PIECES, strict=True))
