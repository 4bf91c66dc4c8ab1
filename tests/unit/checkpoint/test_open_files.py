"""A checkpoint may have more files than a process may open, and the limit is named where it is too low all the same."""

import os
import resource
import shutil
import time
from collections import Counter
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from hfdist.checkpoint import Replicas, Saver, find_newest, read_checkpoint, safetensors_io, save_plan
from hfdist.checkpoint.piece import WEIGHT, Piece
from hfdist.collectives import on_all_ranks, rank
from hfdist.errors import ResourceError
from hfdist.open_files import raise_limit
from hfdist.testing import run_ranks
from tests.unit.checkpoint.pieces import blank, whole, write_checkpoint

MORE = 16
"""Beside those that are open already."""
FILES = 40


def allow(more):
    # The limit is of numbers, and below those in use some may be free. One was that of the listing itself.
    listed = os.listdir("/proc/self/fd")
    taken = {int(number) for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}
    soft = next(islice((number for number in count() if number not in taken), more, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft


def save_and_read(folder):
    save_plan.MAX_MODEL_FILE_BYTES = 8
    pieces = [whole(f"w{number:02d}", WEIGHT, torch.full((2,), float(number))) for number in range(FILES)]
    memory = folder / f"memory-{rank()}"
    memory.mkdir()
    replicas = Replicas(memory, folder / "checkpoints")
    replicas.begin_line(None)
    saver = Saver(in_background=False, replicas=replicas)
    path, found = folder / "step-00000001", []
    allow(MORE)
    saver.save(path, step=1, pieces=pieces, state={}, begin_seconds=time.monotonic())
    replica = replicas.folder / path.name
    for checkpoint in (find_newest(folder), replica):
        loaded = blank(pieces)
        read_checkpoint(checkpoint, loaded)
        found.append(all(torch.equal(a.view, b.view) for a, b in zip(loaded, pieces, strict=True)))
    # Gone from one machine, and back from the other.
    on_all_ranks(lambda: shutil.rmtree(replica) if rank() else None)
    found.append(replicas.find(1) == replica)
    loaded = blank(pieces)
    read_checkpoint(replica, loaded, lambda ranges: replicas.fetch(replica, ranges))
    found.append(torch.equal(loaded[-1].view, pieces[-1].view))
    return len(list(path.glob("*.safetensors"))), found


def test_files_are_opened_one_after_the_other(tmp_path):
    assert run_ranks(save_and_read, 2, tmp_path) == [(FILES, [True] * 4)] * 2


def count_calls(folder):
    save_plan.MAX_MODEL_FILE_BYTES = 8
    tensor, half = torch.arange(4.0), slice(2 * rank(), 2 * rank() + 2)
    pieces = [
        *(whole(f"w{number}", WEIGHT, torch.full((2,), float(number))) for number in range(4)),
        Piece(name="divided", key=WEIGHT, shape=(4,), start=half.start, view=tensor[half].clone()),
    ]
    synced, headers = Counter(), Counter()
    fsync, read_header = os.fsync, safetensors_io.read_header

    def sync(descriptor):
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += 1
        fsync(descriptor)

    def read(path):
        headers[path.name] += 1
        return read_header(path)

    os.fsync, safetensors_io.read_header = sync, read
    write_checkpoint(folder, step=1, pieces=pieces, state={}, write_model_files=lambda path: None)
    path = find_newest(folder)
    loaded = blank(pieces)
    headers.clear()
    read_checkpoint(path, loaded)
    return synced, headers, sorted(file.name for file in path.rglob("*") if file.is_file())


def test_each_writer_syncs_a_file_once_and_one_rank_reads_each_header_once(tmp_path):
    (first, headers, files), (second, other_headers, _) = run_ranks(count_calls, 2, tmp_path)
    by_tensors = [name for name in files if name.startswith("model-") and name.endswith(".safetensors")]
    assert len(by_tensors) == 5
    # Whoever has laid it out: the file of the divided tensor alone has two writers.
    assert sorted(first[name] + second[name] for name in by_tensors) == [1, 1, 1, 1, 2]
    assert all(first[name] + second[name] == 1 for name in files if name not in by_tensors)
    assert headers == Counter(by_tensors)
    assert other_headers == Counter()


def save_with_none_left(folder):
    soft = allow(0)
    with pytest.raises(ResourceError, match=f"RLIMIT_NOFILE {soft}, of at most"):
        write_checkpoint(
            folder, step=1, pieces=[whole("w", WEIGHT, torch.ones(2))], state={}, write_model_files=lambda path: None
        )


def test_a_limit_that_is_too_low_is_named(tmp_path):
    run_ranks(save_with_none_left, 1, tmp_path, group=False)


def raise_own():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
    raise_limit(512)
    with pytest.raises(ResourceError, match=r"(?s)to the other ranks.*RLIMIT_NOFILE 512, of at most 512"):
        raise_limit(513)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_process_may_open_as_many_as_the_system_lets_it():
    assert run_ranks(raise_own, 1, group=False) == [(512, 512)]
