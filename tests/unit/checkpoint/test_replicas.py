"""Replicas in memory: what each machine holds, and from what is left of them a state comes back, or none does."""

import errno
import json
import os
import shutil
import stat
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hfdist.checkpoint import Replicas, Saver, read_checkpoint, replicas, restore_random_state
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.collectives import on_all_ranks, rank, world_size
from hfdist.errors import CheckpointError, ConfigError
from hfdist.testing import RankFailed, run_ranks
from tests.marks import many
from tests.unit.checkpoint.pieces import blank, whole

SHARE = 32768
"""Elements of each of three machines, in several pages of memory."""
MODEL = "model.safetensors"
ON_THREE = (0, 1, 2)


def shares(step=0.0):
    """This rank's part of a matrix and of its state, and a vector that each rank has."""
    size = 3 * SHARE // world_size()
    begin = rank() * size
    matrix = step + torch.arange(3.0 * SHARE)
    return [
        *(
            Piece(name="a", key=key, shape=(3, SHARE), start=begin, view=sign * matrix[begin : begin + size])
            for key, sign in ((WEIGHT, 1), ("exp_avg", -1))
        ),
        whole("a", STEP, torch.tensor(step)),
        whole("b", WEIGHT, step + torch.arange(5.0)),
    ]


def open_replicas(folder, machines):
    memory = folder / f"memory-{machines[rank()]}"
    memory.mkdir(parents=True, exist_ok=True)
    return Replicas(memory, folder / "checkpoints")


def _write(folder, machines, steps, in_background, before_step=None):
    own = open_replicas(folder, machines)
    own.begin_line(own.find(0))
    saver = Saver(in_background=in_background, replicas=own)
    for step in steps:
        if before_step is not None:
            before_step(step)
        torch.manual_seed(100 * rank() + step)
        pieces, state = shares(float(step)), {"step": step}
        saver.save(None, step=step, pieces=pieces, state=state, begin_seconds=time.monotonic())
        saver.wait()


def write(folder, machines=ON_THREE, steps=(1,), in_background=True, before_step=None):
    run_ranks(_write, len(machines), folder, machines, steps, in_background, before_step)


def _read(folder, machines, at_least):
    own = open_replicas(folder, machines)
    found = own.find(at_least)
    if found is None:
        return None, own.passed_over
    found = own.begin_line(found)
    pieces = blank(shares())
    state = read_checkpoint(found, pieces, partial(own.fetch, found))
    wanted = shares(float(state["step"]))
    assert all(torch.equal(a.view, b.view) for a, b in zip(pieces, wanted, strict=True))
    if restore_random_state(found):
        drawn = torch.rand(3)
        torch.manual_seed(100 * rank() + state["step"])
        assert torch.equal(drawn, torch.rand(3))
    return state["step"], own.passed_over


def read(folder, machines=ON_THREE, at_least=0):
    """The step from which all ranks would go on, and why not from others; all values are checked."""
    first, *others = run_ranks(_read, len(machines), folder, machines, at_least)
    assert all(other == first for other in others)
    return first


def replicas_of(folder, machine):
    return sorted(folder.glob(f"memory-{machine}/hfdist-*/*/step-*"))


def flip(replica, name=MODEL, place=-1):
    content = bytearray((replica / name).read_bytes())
    content[place] ^= 1
    (replica / name).write_bytes(bytes(content))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write(folder, steps=(1, 2))
    return folder


@pytest.fixture
def story(written, tmp_path):
    """The same memories once more; the folder of checkpoints stays the run's."""
    shutil.copytree(written, tmp_path / "run")
    names = tmp_path / "run/checkpoints/replicas.json"
    content = json.loads(names.read_text()) | {"inode": names.parent.stat().st_ino}
    names.write_text(json.dumps(content))
    return tmp_path / "run"


def test_a_machine_holds_its_own_share_and_that_of_the_one_before(written, story):
    for machine in ON_THREE:
        (replica,) = replicas_of(written, machine)
        assert replica.name == "step-00000002"
        assert (replica / MODEL).stat().st_size > 3 * 4 * SHARE
        assert (replica / MODEL).stat().st_blocks * 512 < 2.2 * 4 * SHARE
        base = replica.parents[1]
        assert stat.S_IMODE(base.stat().st_mode) == stat.S_IMODE(replica.parent.stat().st_mode) == 0o700
    assert read(story) == (2, [])


@pytest.mark.parametrize("lost", [many(0), many(1), 2])  # the last one's share lies with the first
def test_what_a_machine_has_lost_comes_from_the_next(story, lost):
    shutil.rmtree(story / f"memory-{lost}")
    assert read(story) == (2, [])
    # It is whole again, too: another machine may go now.
    shutil.rmtree(story / f"memory-{(lost + 1) % 3}")
    assert read(story) == (2, [])


def test_two_neighbours_take_a_share_with_them(story):
    shutil.rmtree(story / "memory-0")
    shutil.rmtree(story / "memory-1")
    step, (why,) = read(story)
    assert step is None
    assert why.startswith("step-00000002: ")
    assert "parts are nowhere; damaged: none" in why


@pytest.mark.parametrize("machines", [many((0, 2)), (2, 0, 5, 5), many((1, 1)), many((2, 2, 2, 2, 0, 7))])
def test_other_ranks_on_other_machines_read_it(story, machines):
    for machine in {0, 1, 2} - {*machines}:
        if machine != 1:
            shutil.rmtree(story / f"memory-{machine}")
    gone = {0, 1, 2} - {*machines}
    # Two machines that are gone have taken a share along, if one was after the other.
    assert read(story, machines)[0] == (2 if len(gone) < 2 else None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (MODEL, 9),
        ("training_state/rng-00001.safetensors", -1),
        many(MODEL, -1),
        many("training_state/state.json", 20),
    ],
)
def test_a_bit_that_flips_is_found_and_the_other_copy_used(story, name, place):
    flip(*replicas_of(story, 1), name, place)
    assert read(story) == (2, [])


def test_a_bit_in_both_copies_is_the_end_of_a_replica(story):
    # Machine 1 has its own share, and machine 2 the copy: elements from 40,000 on.
    for machine in (1, 2):
        flip(*replicas_of(story, machine), place=-4 * (3 * SHARE - 40000))
    step, (why,) = read(story)
    assert step is None
    assert f"damaged: {MODEL}, bytes " in why
    assert "(of rank 1), " in why
    assert "(of rank 2)" in why


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("held.json", lambda path: path.write_text("{")),
        many("manifest.json", lambda path: path.unlink()),
        many("held.json", lambda path: path.unlink()),
        many("manifest.json", lambda path: path.write_text("{")),
    ],
)
def test_a_machine_that_does_not_know_what_it_holds_counts_as_empty(story, file, change):
    change(replicas_of(story, 0)[0] / file)
    assert read(story) == (2, [])
    change(replicas_of(story, 1)[0] / file)
    assert read(story) == (2, [])  # machine 0 has got its part again


def test_a_replica_that_only_one_machine_has_finished_does_not_count(written, tmp_path):
    folder = tmp_path / "run"
    write(folder)
    (before,) = replicas_of(folder, 1)
    kept = {
        machine: shutil.copytree(*replicas_of(folder, machine), tmp_path / f"kept-{machine}") for machine in (0, 1, 2)
    }
    names = (folder / "checkpoints/replicas.json").read_text()
    write(folder, steps=(2,))
    # As if the others had been killed between the two renames.
    for machine in (0, 1, 2):
        (newer,) = replicas_of(folder, machine)
        shutil.copytree(kept[machine], newer.with_name(before.name))
        if machine != 1:
            newer.rename(newer.with_name(f"{newer.name}.tmp-00000000"))
    assert names != (folder / "checkpoints/replicas.json").read_text()
    step, (why,) = read(folder)
    assert step == 1
    assert why.startswith("step-00000002: ")
    assert {replica.name for machine in ON_THREE for replica in replicas_of(folder, machine)} == {before.name}


def test_older_ones_than_the_disk_has_do_not_count(story):
    assert read(story, at_least=3) == (None, [])
    assert read(story, at_least=2) == (2, [])


def test_a_machine_that_was_away_brings_nothing_of_another_line(story, tmp_path):
    shutil.copytree(story / "memory-1", tmp_path / "away")
    shutil.rmtree(story / "memory-1")
    assert read(story) == (2, [])
    for machine in ON_THREE:
        shutil.rmtree(story / f"memory-{machine}", ignore_errors=True)
    shutil.copytree(tmp_path / "away", story / "memory-1")
    assert read(story, (1, 1)) == (None, [])


def test_a_copy_of_a_run_has_no_replicas(story, tmp_path):
    shutil.copytree(story, tmp_path / "copy")
    for machine in ON_THREE:
        shutil.rmtree(tmp_path / f"copy/memory-{machine}")
        (tmp_path / f"copy/memory-{machine}").symlink_to(story / f"memory-{machine}")
    assert read(tmp_path / "copy") == (None, [])
    assert read(story) == (2, [])


@pytest.mark.parametrize("in_background", [True, many(False)])
def test_one_machine_needs_one_copy(tmp_path, in_background):
    write(tmp_path, (0, 0), (1, 2), in_background)
    (replica,) = replicas_of(tmp_path, 0)
    assert (replica / MODEL).stat().st_blocks * 512 < 3.2 * 4 * SHARE
    assert read(tmp_path, (0,)) == (2, [])
    assert read(tmp_path, (0, 0)) == (2, [])


def test_a_clean_end_leaves_nothing(tmp_path):
    def end(folder):
        open_replicas(folder, ON_THREE).remove()

    write(tmp_path)
    run_ranks(end, 3, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or "hfdist" in path.name] == []


@pytest.mark.parametrize(
    "plant", [lambda path: os.symlink("/tmp", path), lambda path: (path.mkdir(), path.chmod(0o777))]
)
def test_a_folder_that_others_may_write_is_refused(tmp_path, plant):
    plant(tmp_path / f"hfdist-{os.geteuid()}")
    with pytest.raises(ConfigError, match="others may write") as caught:
        Replicas(tmp_path, tmp_path / "checkpoints")
    assert "mode 0700" in str(caught.value)


def test_a_part_that_cannot_be_read_on_its_way_fails_on_all_ranks(story):
    def lose_between(folder):
        own = open_replicas(folder, ON_THREE)
        found = own.find(0)
        if rank() == 2:
            (found / MODEL).unlink()
        on_all_ranks(lambda: None)
        try:
            read_checkpoint(found, blank(shares()), partial(own.fetch, found))
        except CheckpointError as error:
            return error.what

    shutil.rmtree(story / "memory-1")
    whats = run_ranks(lose_between, 3, story)
    assert all("cannot be read" in what or "missing" in what or "damaged" in what for what in whats), whats


@pytest.mark.parametrize(("sick", "step"), [(("memory-1",), 2), (("memory-0", "memory-1", "memory-2"), None)])
def test_a_part_that_the_system_cannot_read_is_taken_from_the_other_copy(story, monkeypatch, sick, step):
    is_intact = replicas.is_intact

    def read_or_fail(path, part):
        # Once: what comes from the other copy is checked, too.
        replicas.is_intact = is_intact
        if path.parents[2].name in sick:
            raise OSError(errno.EIO, "Input/output error")
        return is_intact(path, part)

    monkeypatch.setattr(replicas, "is_intact", read_or_fail)
    assert read(story)[0] == step


# ---- memory that becomes full, or is taken away ----


def leave_no_room(step):
    """Beside the one that is written."""
    replicas.psutil.virtual_memory = lambda: SimpleNamespace(available=0)


def test_the_first_replica_must_find_room_for_another_and_those_after_it_have_theirs(tmp_path):
    with pytest.raises(RankFailed, match="the memory has no room for replicas of the state"):
        write(tmp_path / "none", before_step=leave_no_room)
    write(tmp_path / "one")
    # A start from a replica: with the next one there are two, and then one again.
    write(tmp_path / "one", steps=(2, 3), before_step=leave_no_room)
    assert read(tmp_path / "one") == (3, [])


def test_without_memory_for_one_rank_all_go_on_without_replicas(tmp_path):
    def fill(step):
        if step == 2 and rank() == 1:
            pwrite = os.pwrite

            def write_or_fail(*arguments):
                os.pwrite = pwrite
                raise OSError(errno.ENOSPC, "No space left on device")

            os.pwrite = write_or_fail

    write(tmp_path, steps=(1, 2, 3), before_step=fill)
    assert read(tmp_path) == (1, [])
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize("in_background", [many(True), False])
def test_without_its_folder_training_goes_on_without_replicas(tmp_path, in_background):
    def remove(step):
        if step == 2 and rank() == 0:
            shutil.rmtree(tmp_path / "memory-0")

    write(tmp_path, (0, 0), (1, 2, 3), in_background, remove)
    assert replicas_of(tmp_path, 0) == []
