"""Several ranks save together: one that fails or dies takes nothing with it, and all ranks hear the same.

Saves in the background do not meet the collectives of the training, and their failures end all ranks alike.
"""

import errno
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hfdist.checkpoint import Keep, Saver, find_newest, prune, read_checkpoint, restore_random_state, verify
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero
from hfdist.config.composition.compose import compose_config
from hfdist.control_group import exchange_json
from hfdist.errors import CheckpointError, ResourceError
from hfdist.testing import run_ranks
from recipes.pretrain import main
from tests.distributed.runs import SMALL, losses, pretrain
from tests.unit.checkpoint.pieces import flip_a_bit, write_checkpoint

pytestmark = pytest.mark.distributed

TOTAL = 1001


def share(value=1.0, key=WEIGHT):
    """This rank's part of a vector that is cut unevenly over the ranks."""
    values = value * torch.arange(float(TOTAL))
    edges = [TOTAL * (rank**2) // dist.get_world_size() ** 2 for rank in range(dist.get_world_size() + 1)]
    start, stop = edges[dist.get_rank()], edges[dist.get_rank() + 1]
    return Piece(name="w", key=key, shape=(7, 143), start=start, view=values[start:stop].clone())


def save(folder, step, pieces=None, write_model_files=lambda path: None):
    return write_checkpoint(
        folder,
        step=step,
        pieces=[share(step)] if pieces is None else pieces,
        state={"step": step},
        write_model_files=write_model_files,
    )


def save_watched(folder):
    synced, sync = set(), os.fsync

    def watched(descriptor):
        # Files that have their name already are synced too late.
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if "step-00000001" not in path.parts:
            synced.add(path.name)
        sync(descriptor)

    os.fsync = watched
    save(folder, 1)
    return synced


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path):
    synced = set().union(*run_ranks(save_watched, 2, tmp_path))
    written = {path.name for path in (tmp_path / "step-00000001").rglob("*")}
    assert len(written) > 4
    assert written | {tmp_path.name} <= synced


def failures_of(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def fail_on_rank(failing, error):
    """Pieces whose listing fails on one rank alone."""
    yield share()
    if dist.get_rank() == failing:
        raise error


def save_failing(folder):
    """Every failure of one rank, in turn, and a good save between them."""
    heard = []
    causes = [
        lambda: save(folder, 2, fail_on_rank(1, CheckpointError("cannot list", where="here", hint="do this"))),
        lambda: save(folder, 2, fail_on_rank(0, ResourceError("too little"))),
        lambda: save(folder, 2, fail_on_rank(1, OSError(28, "No space left on device", "/full/disk"))),
        lambda: save(folder, 2, fail_on_rank(1, ValueError("a mistake of ours"))),
        lambda: save(folder, 2, write_model_files=refuse),
        lambda: save(folder, 2, [share()] if dist.get_rank() else []),
        lambda: save(folder, 2, [Piece(name="w", key=STEP, shape=(), start=0, view=torch.tensor(dist.get_rank()))]),
        lambda: read_checkpoint(folder / "step-00000001", fail_on_rank(1, CheckpointError("cannot list"))),
        lambda: read_checkpoint(folder / "step-00000001", [share()] if dist.get_rank() else []),
    ]
    save(folder, 1)
    for cause in causes:
        heard.append(failures_of(cause))
        assert find_newest(folder) == folder / "step-00000001"
    return heard


def refuse(path):
    (path / "config.json").write_text("{}")
    raise OSError(30, "Read-only file system", str(path))


def test_a_failure_of_one_rank_is_heard_by_all(tmp_path):
    first, second = run_ranks(save_failing, 2, tmp_path, timeout_seconds=60)
    kinds = [
        ("CheckpointError", "cannot list"),
        ("ResourceError", "too little"),
        ("ResourceError", "no space is left"),
        (None, "a mistake of ours"),
        ("CheckpointError", "Read-only file system"),
        ("CheckpointError", "no rank holds"),
        ("CheckpointError", "how often a parameter was stepped"),
        ("CheckpointError", "cannot list"),
    ]
    for heard in (first, second):
        for (kind, text), failure in zip(kinds, heard, strict=False):
            assert failure is not None
            assert text in failure[1]
            assert kind in (failure[0], None)
        # Reading less than everything is no failure: a rank may hold none of a tensor.
        assert heard[-1] is None
    assert "where:   here" in first[0][1]
    assert "try:     do this" in first[0][1]
    assert second[3] == ("ValueError", "a mistake of ours")
    assert first[3][0] == "CheckpointError"
    assert os.listdir(tmp_path) == ["step-00000001"]


def save_steps(folder):
    for step in (1, 2, 3, 4):
        save(folder, step)


def find_and_prune(folder):
    found = find_newest(folder)
    dist.barrier()
    prune(folder, Keep(newest=1))
    return found


def test_all_ranks_agree_on_the_newest_that_verifies(tmp_path):
    run_ranks(save_steps, 2, tmp_path)
    # Whichever rank happens to check the damaged file, all must hear of it.
    for step, name in ((3, "model.safetensors"), (4, "training_state/rng-00001.safetensors")):
        flip_a_bit(tmp_path / f"step-{step:08d}" / name)
    assert run_ranks(find_and_prune, 4, tmp_path) == [tmp_path / "step-00000002"] * 4
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003.bad-hash", "step-00000004.bad-hash"]


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def draw_after_saving(folder):
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    random.seed(dist.get_rank())
    save(folder, 1)
    return draw()


def draw_after_restoring(path):
    before = draw()
    torch.manual_seed(7)
    return draw() if restore_random_state(path) else before


def test_every_rank_has_its_own_random_state(tmp_path):
    expected = run_ranks(draw_after_saving, 2, tmp_path)
    assert expected[0] != expected[1]
    assert run_ranks(draw_after_restoring, 2, tmp_path / "step-00000001") == expected
    assert restore_random_state(tmp_path / "step-00000001") is False


def exchange(sizes):
    value = {"rank": dist.get_rank(), "text": "ä" * sizes[dist.get_rank()]}
    with pytest.raises((TypeError, CheckpointError), match="not JSON serializable"):
        on_all_ranks(lambda: None if dist.get_rank() else torch.zeros(1))
    # Each rank has something else for each other one, and nothing for the next.
    own = dist.get_rank()
    sent = [[] if other == (own + 1) % 3 else [own, other, "ö" * sizes[other]] for other in range(3)]
    of_rank_zero = on_rank_zero(lambda: [own, "ü" * sizes[1]])
    return gather_json(value), on_all_ranks(dist.get_rank), exchange_json(sent), of_rank_zero


def test_values_of_any_length_are_exchanged_and_one_that_is_no_json_fails_on_all_ranks():
    sizes = [0, 70_000, 3]
    for own, (gathered, ranks, swapped, of_rank_zero) in enumerate(run_ranks(exchange, 3, sizes, timeout_seconds=60)):
        assert [value["rank"] for value in gathered] == ranks == [0, 1, 2]
        assert [len(value["text"]) for value in gathered] == sizes
        expected = [[] if own == (other + 1) % 3 else [other, own, "ö" * sizes[own]] for other in range(3)]
        assert swapped == expected
        assert of_rank_zero == [0, "ü" * sizes[1]]


def numbered(steps):
    """Parameters that all ranks hold, each stepped its own number of times."""
    for name, step in steps.items():
        yield Piece(name=name, key=WEIGHT, shape=(2,), start=0, view=torch.ones(2))
        yield Piece(name=name, key=STEP, shape=(), start=0, view=torch.tensor(float(step)))


def save_numbers(folder):
    # `b` only the last rank has stepped.
    own = {"a": 3} | ({"b": 5} if dist.get_rank() == 2 else {})
    save(folder, 1, list(numbered(own)))
    with pytest.raises(CheckpointError, match="the ranks disagree about how often") as caught:
        save(folder, 2, list(numbered({"a": 3, "b": 5 + dist.get_rank() // 2})))
    return caught.value.where, caught.value.found


def test_step_counts_are_of_all_ranks_and_a_disagreement_is_named(tmp_path):
    assert run_ranks(save_numbers, 3, tmp_path) == [("b", "5 and 6")] * 3
    state = json.loads((tmp_path / "step-00000001" / "training_state" / "state.json").read_text())
    assert state["steps"] == {"a": 3, "b": 5}
    assert os.listdir(tmp_path) == ["step-00000001"]


# ---- in the background ----

NUM_ELEMENTS = 300_000


def train_and_save(folder):
    """Twelve saves of a cut tensor, with collectives of the training between and during them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(float(NUM_ELEMENTS)).chunk(size)[rank].clone()
    saver, start = Saver(), sum(len(part) for part in torch.arange(NUM_ELEMENTS).chunk(size)[:rank])
    for step in range(1, 13):
        piece = Piece(name="w", key=WEIGHT, shape=(NUM_ELEMENTS,), start=start, view=own)
        saver.save(
            folder / step_name(step),
            step=step,
            pieces=[piece],
            state={},
            keep=Keep(newest=2),
            begin_seconds=time.monotonic(),
        )
        for _ in range(5):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full((1000,), float(size)))
            own += 1
    saver.wait()
    dist.barrier()
    return sorted(os.listdir(folder))


def test_saves_and_collectives_of_the_training_do_not_meet(tmp_path):
    assert run_ranks(train_and_save, 3, tmp_path) == [["step-00000011", "step-00000012"]] * 3
    for step in (11, 12):
        verify(tmp_path / f"step-000000{step}")
    saved = (tmp_path / "step-00000012" / "model.safetensors").read_bytes()
    elements = torch.frombuffer(bytearray(saved), dtype=torch.float32)[-NUM_ELEMENTS:]
    assert torch.equal(elements, torch.arange(float(NUM_ELEMENTS)) + 55)


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
