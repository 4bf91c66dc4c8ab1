"""Finding the newest good checkpoint, moving bad ones aside, removing the oldest; nobody is led out of the folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import xxhash

import hfdist
from hfdist.checkpoint import Keep, find_newest, prune, read_checkpoint, read_state, save_plan, verify
from hfdist.checkpoint.manifest import MANIFEST, FormatError
from hfdist.errors import CheckpointError
from hfdist.testing import RankFailed, run_ranks
from tests.unit.checkpoint.pieces import blank, edit_manifest, save, small_pieces

OPTIMIZER = "training_state/optimizer-00001-of-00001.safetensors"


def cut(path):
    content = (path / OPTIMIZER).read_bytes()
    (path / OPTIMIZER).write_bytes(content[:-1])


def flip_a_bit(path):
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def tell(change):
    return lambda path: edit_manifest(path, change)


def tell_without_hash(path):
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"step": 2', '"step": 3'))


def change_the_format_alone(path):
    """As a bit that flips does: in a checkpoint of another format the manifest's hash would be of this number."""
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"format": 2', '"format": 3'))


def link_outside(path):
    outside = path.parent.parent / "outside.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def link_a_folder_outside(path):
    outside = path.parent.parent / "outside"
    (path / "training_state").rename(outside)
    (path / "training_state").symlink_to(outside)


def move_record(to):
    return tell(lambda content: content["files"].update({to: content["files"].pop("model.safetensors")}))


DAMAGE = {
    "no-manifest": [lambda path: (path / MANIFEST).unlink()],
    "missing-file": [lambda path: (path / "config.json").unlink(), lambda path: (path / OPTIMIZER).unlink()],
    "size": [cut],
    "hash": [flip_a_bit],
    "bad-json": [lambda path: (path / MANIFEST).write_text("{"), lambda path: (path / MANIFEST).write_bytes(b"\xff")],
    "bad-manifest": [
        lambda path: (path / MANIFEST).write_text("[]"),
        tell(lambda content: content.pop("files")),
        tell(lambda content: content["files"].update(x=1)),
        tell(lambda content: content["files"]["model.safetensors"]["parts"][0].__setitem__(0, -1)),
        tell(lambda content: content["files"]["model.safetensors"].update(bytes=1)),
        tell_without_hash,
    ],
    "step": [tell(lambda content: content.update(step=8))],
    "format": [change_the_format_alone],
    "outside": [
        link_outside,
        link_a_folder_outside,
        move_record("../outside.safetensors"),
        move_record("/etc/passwd"),
        move_record("training_state/../../x"),
        move_record("a\0b"),
    ],
}
CASES = [(reason, damage) for reason, damages in DAMAGE.items() for damage in damages]


@pytest.mark.parametrize(("reason", "damage"), CASES)
def test_a_damaged_checkpoint_is_passed_over_and_kept(tmp_path, caplog, reason, damage):
    folder = tmp_path / "checkpoints"
    good, bad = save(folder, 1), save(folder, 2)
    verify(bad)
    damage(bad)
    if reason != "step":
        with pytest.raises(CheckpointError):
            verify(bad)
    assert find_newest(folder) == good
    assert sorted(os.listdir(folder)) == ["step-00000001", f"step-00000002.bad-{reason}"]
    assert f"step-00000002.bad-{reason}" in caplog.text
    assert find_newest(folder) == good


def test_what_cannot_be_read_is_left_alone(tmp_path, monkeypatch):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)

    def fail(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle", str(newest))

    with monkeypatch.context() as patched:
        patched.setattr("hfdist.checkpoint.folder.check_files", fail)
        with pytest.raises(CheckpointError, match="Stale file handle"):
            find_newest(tmp_path)
    assert find_newest(tmp_path) == newest


def find_where_the_disk_is(path):
    if dist.get_rank() == 1:
        path = path.with_name("not-mounted")
    return str(find_newest(path))


def test_a_rank_without_the_disk_damages_nothing(tmp_path):
    newest = save(tmp_path / "checkpoints", 2)
    with pytest.raises(RankFailed, match="no manifest on rank 1"):
        run_ranks(find_where_the_disk_is, 2, tmp_path / "checkpoints")
    assert find_newest(tmp_path / "checkpoints") == newest


def test_a_save_of_the_same_step_that_is_killed_leaves_the_older(tmp_path, monkeypatch):
    older = save(tmp_path, 2, state={"which": "older"})

    rename = Path.rename

    def kill_before_the_last(path, target):
        if ".tmp-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", kill_before_the_last)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, state={"which": "newer"})
    assert not older.exists()
    assert find_newest(tmp_path) == older
    assert read_state(older) == {"which": "older"}
    assert read_state(save(tmp_path, 2, state={"which": "newer"})) == {"which": "newer"}
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_the_newest_is_chosen_by_number(tmp_path):
    assert find_newest(tmp_path / "missing") is None
    assert find_newest(tmp_path) is None
    save(tmp_path, 9)
    newest = save(tmp_path, 123456789)
    save(tmp_path, 10)
    (tmp_path / "step-99999999999.tmp-1a2b3c4d").mkdir()
    (tmp_path / "step-00000abc").mkdir()
    (tmp_path / "step-00000999").write_text("a file")
    assert find_newest(tmp_path) == newest


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_where_none_can_be_used_nothing_is_touched(tmp_path):
    flip_a_bit(save(tmp_path, 1))
    cut(save(tmp_path, 2))
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="none of the run's checkpoints can be used") as caught:
        find_newest(tmp_path)
    assert "step-00000002: a file of the checkpoint was cut" in caught.value.found
    assert "step-00000001: the content of a file" in caught.value.found
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("version", "written_by", "said"),
    [(1, None, "hfdist an earlier version"), (3, None, "hfdist a later version"), (3, "7.1.0", "hfdist 7.1.0")],
)
def test_another_format_is_no_damage(tmp_path, version, written_by, said):
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    cut(save(folder, 3))

    def change(content):
        content.update(format=version)
        content.pop("hfdist") if written_by is None else content.update(hfdist=written_by)

    edit_manifest(save(folder, 2), change)
    before = files_of(folder)
    with pytest.raises(FormatError) as caught:
        find_newest(folder)
    assert f"format {version}, written by {said}" in str(caught.value)
    assert f"format 2, which hfdist {hfdist.__version__} reads" in str(caught.value)
    assert files_of(folder) == before
    with pytest.raises(FormatError):
        read_checkpoint(folder / "step-00000002", blank(small_pieces(2)))
    # An older one of another format is none that a run would go on from.
    newest = save(folder, 4)
    assert find_newest(folder) == newest
    assert (folder / "step-00000002").is_dir()


def link_away(path):
    """As somebody does who moves an old checkpoint to another disk."""
    away = path.parent.parent / "archive" / path.name
    away.parent.mkdir(exist_ok=True)
    path.rename(away)
    path.symlink_to(away)
    return away


def test_of_a_link_the_link_alone_is_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    archived = [link_away(save(folder, step)) for step in (1, 2)]
    before = files_of(archived[0].parent)
    save(folder, 3)
    prune(folder, Keep(newest=2))
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    # By an earlier version, which renamed links and could not remove them.
    (folder / "step-00000001.tmp-0123abcd").symlink_to(archived[0])
    (folder / "step-00000003.tmp-0123abcd").write_text("a file")
    save(folder, 2)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    assert not (folder / "step-00000002").is_symlink()
    assert files_of(archived[0].parent) == before


def test_a_link_to_nothing_is_no_hindrance(tmp_path):
    (tmp_path / "step-00000002").symlink_to(tmp_path / "gone")
    path = save(tmp_path, 2)
    assert find_newest(tmp_path) == path
    assert os.listdir(tmp_path) == [path.name]


def test_what_cannot_be_removed_stops_nothing(tmp_path, monkeypatch, caplog):
    left = tmp_path / "step-00000007.tmp-0123abcd"
    left.mkdir()

    def fail(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("hfdist.checkpoint.folder.shutil.rmtree", fail)
        save(tmp_path, 8)
    assert f"{left} cannot be removed" in caplog.text
    save(tmp_path, 9)
    assert not left.exists()


def test_the_oldest_are_removed(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    prune(tmp_path, Keep(newest=2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000004", "step-00000005"]
    prune(tmp_path, Keep(newest=9))
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("newest", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("names_the_latest", [False, True])
def test_as_many_stay_as_there_is_room_for(tmp_path, newest, names_the_latest):
    for step in range(1, 7):
        path = save(tmp_path, step)
        named = frozenset({path.name} if names_the_latest else ())
        prune(tmp_path, Keep(newest=newest, named=named))
        assert steps(tmp_path) == list(range(max(step - newest, 0) + 1, step + 1))


def test_more_than_the_newest_may_be_kept(tmp_path):
    for step, loss in enumerate([4.0, 2.0, 3.0, None, 2.5, 3.5], start=1):
        save(tmp_path, step, state={"held_out_loss": loss})
        prune(tmp_path, Keep(newest=1, every=3, best=True))
    assert steps(tmp_path) == [2, 3, 6]
    prune(tmp_path, Keep(newest=1, best=True))
    assert steps(tmp_path) == [2, 6]
    (tmp_path / "step-00000002" / "training_state" / "state.json").write_text("{")
    prune(tmp_path, Keep(newest=1, best=True))
    assert steps(tmp_path) == [6]


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_the_next_save_clears_what_killed_ones_left(tmp_path):
    left = tmp_path / "step-00000007.tmp-0123abcd"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    # Damaged, and the user's own.
    others = ["checkpoint-5.tmp-1", "checkpoint-5.tmp-old", "step-00000005.bad-hash", "step-5.tmp-0123abcd"]
    for name in others:
        (tmp_path / name).mkdir()
    save(tmp_path, 8)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "step-00000008"])


def tampered_index(path, change):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    change(index)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["weight_map"].update(a="/etc/passwd"),
        lambda index: index["weight_map"].update(a="../../x"),
        lambda index: index["weight_map"].update(a="config.json"),
        lambda index: index["weight_map"].update(a=index["weight_map"]["b"]),
        lambda index: index["weight_map"].update(new=index["weight_map"]["b"]),
        lambda index: index["weight_map"].pop("a"),
        lambda index: index["weight_map"].update(a=3),
        lambda index: index.pop("weight_map"),
        lambda index: index.update(weight_map=[1]),
    ],
)
def test_a_tampered_index_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(save_plan, "MAX_FILE_BYTES", 40)
    path = save(tmp_path, 1)
    tampered_index(path, change)
    with pytest.raises(CheckpointError):
        read_checkpoint(path, blank(small_pieces()))


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": {"a": "x"}}', '{"steps": [], "state": {}, "format": 2}', "1"])
def test_a_damaged_state_is_refused(tmp_path, text):
    path = save(tmp_path, 1)
    (path / "training_state" / "state.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path, blank(small_pieces()))


def test_a_file_that_shrinks_under_the_reader_is_refused(tmp_path):
    path = save(tmp_path, 1)
    cut(path)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_checkpoint(path, blank(small_pieces()))


SAVE_FOREVER = """
import sys, pathlib, itertools, torch
torch.set_num_threads(1)
from tests.unit.checkpoint.pieces import save, whole
folder = pathlib.Path(sys.argv[1])
from hfdist.checkpoint import Keep, prune
for step in itertools.count(int(sys.argv[2])):
    save(folder, step, [whole(name, "weight", torch.full((100_000,), float(step))) for name in "abc"], {"step": step})
    prune(folder, Keep(newest=2))
"""


@pytest.mark.faults
def test_a_process_killed_at_any_moment_leaves_a_good_checkpoint(tmp_path):
    """`kill -9` at eight moments while it saves without a pause: the newest that verifies is whole and of one step."""
    import torch

    from tests.unit.checkpoint.pieces import whole

    first = 1
    for attempt in range(8):
        child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(first)], cwd=Path.cwd())
        wanted = tmp_path / f"step-{first + 2:08d}"
        deadline = time.monotonic() + 60
        while not wanted.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.003 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        newest = find_newest(tmp_path)
        assert newest is not None
        pieces = [whole(name, "weight", torch.zeros(100_000)) for name in "abc"]
        step = read_checkpoint(newest, pieces)["step"]
        assert newest.name == f"step-{step:08d}"
        assert step >= first + 2
        assert all((piece.view == step).all() for piece in pieces)
        first = step + 1


def test_hashes_are_those_of_the_bytes(tmp_path):
    path = save(tmp_path, 1)
    for name, record in json.loads((path / MANIFEST).read_text())["files"].items():
        content = (path / name).read_bytes()
        assert len(content) == record["bytes"]
        for num_bytes, digest in record["parts"]:
            assert xxhash.xxh3_128(content[:num_bytes]).hexdigest() == digest
            content = content[num_bytes:]
        assert content == b""
