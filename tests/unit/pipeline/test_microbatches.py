"""Batches cut into micro batches: all rows, once, and nothing that counts besides."""

import pytest
import torch

from hfdist.errors import ConfigError
from hfdist.pipeline.microbatches import split_batch


def rows(num_rows, num_tokens=3):
    ids = torch.arange(num_rows * num_tokens).view(num_rows, num_tokens)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": ids % 2}


@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(8, 4), (8, 8), (6, 1), (10, 8), (7, 3), (2, 4), (1, 4)])
def test_every_row_goes_to_one_micro_batch_in_order(num_rows, num_microbatches):
    batch = rows(num_rows)
    parts = split_batch(batch, num_microbatches)
    assert len(parts) == num_microbatches
    assert all(part.keys() == batch.keys() for part in parts)
    assert len({part["input_ids"].shape for part in parts}) == 1
    together = {name: torch.cat([part[name] for part in parts]) for name in batch}
    for name, value in batch.items():
        assert torch.equal(together[name][:num_rows], value)
    # What fills up is real input without a target.
    assert (together["labels"][num_rows:] == -100).all()
    assert all(torch.equal(row, batch["input_ids"][0]) for row in together["input_ids"][num_rows:])


def test_no_more_is_filled_up_than_needed():
    assert [len(part["input_ids"]) for part in split_batch(rows(10), 4)] == [3, 3, 3, 3]
    assert [len(part["input_ids"]) for part in split_batch(rows(2), 4)] == [1, 1, 1, 1]


def test_masks_of_any_rank_are_cut_with_their_rows():
    mask = torch.rand(5, 1, 3, 3) > 0.5
    parts = split_batch(rows(5) | {"attention_mask": mask, "shift_labels": rows(5)["labels"]}, 2)
    assert torch.equal(torch.cat([part["attention_mask"] for part in parts])[:5], mask)
    assert parts[1]["attention_mask"].dtype is torch.bool
    assert parts[1]["shift_labels"][-1].tolist() == [-100] * 3


@pytest.mark.parametrize("num_kinds", [3, 4])
def test_positions_of_images_are_cut_along_their_rows(num_kinds):
    # As many kinds as rows must not be taken for these.
    places = torch.arange(num_kinds * 4 * 3).view(num_kinds, 4, 3)
    parts = split_batch(rows(4) | {"position_ids": places}, 2)
    assert [part["position_ids"].tolist() for part in parts] == [places[:, :2].tolist(), places[:, 2:].tolist()]
    *_, last = split_batch(rows(4) | {"position_ids": places}, 3)
    assert last["position_ids"].tolist() == places[:, :1].expand(-1, 2, -1).tolist()
    shared = places[:, :1]
    assert all(part["position_ids"] is shared for part in split_batch(rows(4) | {"position_ids": shared}, 2))


def test_what_has_no_rows_goes_to_all():
    shared = {"position_ids": torch.arange(3)[None], "scale": torch.tensor(2.0), "max_length": 3, "lengths": None}
    for part in split_batch(rows(4) | shared, 2):
        assert all(part[name] is value for name, value in shared.items())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.zeros(4, 3, 3)),
        ("position_ids", torch.zeros(4, 5, 3)),
        ("cu_seq_lens_q", torch.arange(4)),
        ("attention_mask", torch.ones(8, 3)),
    ],
)
def test_what_is_not_cut_by_sequences_is_refused(name, value):
    with pytest.raises(ConfigError, match="by its sequences") as refused:
        split_batch(rows(4) | {name: value}, 2)
    assert refused.value.where == f"batch['{name}']"


def test_cutting_whole_batches_copies_nothing():
    batch = rows(8)
    for index, part in enumerate(split_batch(batch, 4)):
        assert part["input_ids"].data_ptr() == batch["input_ids"][2 * index].data_ptr()


def test_images_go_with_their_rows():
    patches = torch.arange(7)[:, None].expand(7, 2)
    sizes = torch.arange(3)[:, None]
    counts = {
        "hfdist_rows_of.patches": torch.tensor([3, 0, 0, 4, 0]),
        "hfdist_rows_of.sizes": torch.tensor([2, 0, 0, 1, 0]),
    }
    first, second, last = split_batch(rows(5) | {"patches": patches, "sizes": sizes} | counts, 3)
    assert torch.equal(first["patches"], patches[:3])
    assert torch.equal(first["sizes"], sizes[:2])
    assert torch.equal(second["patches"], patches[3:])
    # The row that fills up is the first one, with its images; and a forward knows no counts.
    assert torch.equal(last["patches"], patches[:3])
    assert first.keys() == rows(1).keys() | {"patches", "sizes"}


def test_a_micro_batch_without_images_has_nothing_of_them():
    counts = {"hfdist_rows_of.patches": torch.tensor([0, 0, 2, 1])}
    text, images = split_batch(rows(4) | {"patches": torch.rand(3, 2)} | counts, 2)
    assert text.keys() == rows(1).keys()
    assert len(images["patches"]) == 3
