"""Saves beside the training on several ranks: collectives are not disturbed, and a failure ends all ranks alike."""

import errno
import os
import time

import pytest
import torch
import torch.distributed as dist

from hfdist.checkpoint import Keep, Saver, verify
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ResourceError
from hfdist.testing import run_ranks
from recipes.pretrain import main
from tests.distributed.runs import SMALL, losses, pretrain

pytestmark = pytest.mark.distributed

TOTAL = 300_000


def train_and_save(folder):
    """Twelve saves of a cut tensor, with collectives of the training between and during them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = torch.arange(float(TOTAL)).chunk(size)[rank].clone()
    saver, start = Saver(), sum(len(part) for part in torch.arange(TOTAL).chunk(size)[:rank])
    for step in range(1, 13):
        piece = Piece(name="w", key=WEIGHT, shape=(TOTAL,), start=start, view=share)
        saver.save(
            folder / step_name(step),
            step=step,
            pieces=[piece],
            state={},
            write_model_files=lambda path: None,
            keep=Keep(newest=2),
            begin_seconds=time.monotonic(),
        )
        for _ in range(5):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full((1000,), float(size)))
            share += 1
    saver.wait()
    dist.barrier()
    return sorted(os.listdir(folder))


def test_saves_and_collectives_of_the_training_do_not_meet(tmp_path):
    assert run_ranks(train_and_save, 3, tmp_path) == [["step-00000011", "step-00000012"]] * 3
    for step in (11, 12):
        verify(tmp_path / f"step-000000{step}")
    saved = (tmp_path / "step-00000012" / "model.safetensors").read_bytes()
    elements = torch.frombuffer(bytearray(saved), dtype=torch.float32)[-TOTAL:]
    assert torch.equal(elements, torch.arange(float(TOTAL)) + 55)


def fill_the_disk_of_rank_1(config):
    """Runs the recipe; the disk is full for rank 1 from its second save on. Gives the message."""
    real = os.pwrite

    def write(descriptor, data, offset):
        if "step-00000008" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    if dist.get_rank() == 1:
        os.pwrite = write
    with pytest.raises(ResourceError) as caught:
        main.__wrapped__(config)
    return str(caught.value)


def test_a_failed_save_ends_all_ranks_and_the_run_goes_on_from_the_last_good_one(tmp_path):
    settings = ("strategy=zero2", "train.max_steps=9", "checkpoint=default", "checkpoint.every=4", "checkpoint.keep=1")
    config = compose_config([*SMALL, *settings, f"run.dir={tmp_path / 'run'}"])
    for message in run_ranks(fill_the_disk_of_rank_1, 2, config):
        assert "the disk has no room for the checkpoint" in message
        assert "bytes needed" in message
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000004"]
    pretrain(tmp_path / "run", 2, *settings)
    whole = pretrain(tmp_path / "whole", 2, *settings[:2])
    assert losses(tmp_path / "run") == losses(whole)
    verify(tmp_path / "run" / "checkpoints" / "step-00000009")
