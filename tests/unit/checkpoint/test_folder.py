"""Finding the newest good checkpoint, moving bad ones aside, removing the oldest; nobody is led out of the folder."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import xxhash

import hfdist
from hfdist.checkpoint import (
    Keep,
    find_newest,
    prune,
    read_checkpoint,
    read_state,
    safetensors_io,
    save_plan,
    verify,
    write,
)
from hfdist.checkpoint.manifest import MANIFEST, DamagedError, FormatError, Manifest, Part, list_parts, read_manifest
from hfdist.checkpoint.piece import WEIGHT
from hfdist.errors import CheckpointError
from hfdist.records import RunFolder
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.checkpointing.checkpoint_folder import CheckpointFolder
from hfdist.trainer.checkpointing.save_options import SaveOptions
from tests.unit.checkpoint.pieces import (
    blank,
    edit_manifest,
    files_of,
    flip_a_bit,
    save,
    small_pieces,
    whole,
    write_checkpoint,
)

OPTIMIZER = "training_state/optimizer-00001-of-00001.safetensors"
HASHES = "training_state/hashes-00000.json"
FORMAT_2 = Path(__file__).with_name("format2") / "step-00000002"


def cut(path):
    (path / OPTIMIZER).write_bytes((path / OPTIMIZER).read_bytes()[:-1])


def tell(change):
    return lambda path: edit_manifest(path, change)


def replace_text(old, new):
    """Without a new hash. In a checkpoint of another format the manifest's hash would be of its number."""
    return lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace(old, new))


def replace_hashes(content):
    """With a manifest that agrees."""

    def replace(path):
        text = json.dumps(content)
        (path / HASHES).write_text(text)
        record = {"bytes": len(text), "xxh128": xxhash.xxh3_128(text.encode()).hexdigest()}
        edit_manifest(path, lambda manifest: manifest["files"].update({HASHES: record}))

    return replace


def link_outside(name):
    def link(path):
        outside = path.parent.parent / "outside"
        (path / name).rename(outside)
        (path / name).symlink_to(outside)

    return link


def move_record(to):
    return tell(lambda content: content["files"].update({to: content["files"].pop("model.safetensors")}))


DAMAGE = {
    "no-manifest": [lambda path: (path / MANIFEST).unlink()],
    "missing-file": [lambda path: (path / "config.json").unlink()],
    "size": [cut, tell(lambda content: content["files"]["model.safetensors"].update(bytes=1))],
    "hash": [lambda path: flip_a_bit(path / "model.safetensors"), lambda path: flip_a_bit(path / HASHES)],
    "bad-hashes": [replace_hashes([1]), replace_hashes({"model.safetensors": [[-1, 1, ""]]}), replace_hashes({"a": 1})],
    "parts": [replace_hashes({}), tell(lambda content: content["files"][HASHES].pop("xxh128"))],
    "bad-json": [lambda path: (path / MANIFEST).write_text("{"), lambda path: (path / MANIFEST).write_bytes(b"\xff")],
    "bad-manifest": [
        lambda path: (path / MANIFEST).write_text("[]"),
        tell(lambda content: content.pop("files")),
        tell(lambda content: content["files"].update(x=1)),
        tell(lambda content: content["files"]["model.safetensors"].update(bytes=-1)),
        tell(lambda content: content["files"]["model.safetensors"].update(parts=[[1, ""]])),
        replace_text('"step": 2', '"step": 3'),
    ],
    "step": [tell(lambda content: content.update(step=8))],
    "format": [replace_text('"format": 3', '"format": 2'), replace_text('"format": 3', '"format": 4')],
    "outside": [
        link_outside("model.safetensors"),
        link_outside("training_state"),
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
    return str(find_newest(path if dist.get_rank() == 0 else path.with_name("not-mounted")))


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


def test_a_run_that_cannot_go_on_finds_no_way_back_where_none_can_be_used(tmp_path, caplog):
    """Then it tells why it cannot go on."""
    cut(save(RunFolder(tmp_path).checkpoints, 1))
    trainer = SimpleNamespace(_get_output_dir=lambda trial: str(tmp_path))
    folder = CheckpointFolder(SimpleNamespace(trainer=trainer), SaveOptions(run_values={}))
    assert folder.find_own() is None
    assert "none of the run's checkpoints can be used" in caplog.text


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


def test_where_none_can_be_used_nothing_is_touched(tmp_path):
    flip_a_bit(save(tmp_path, 1) / "model.safetensors")
    cut(save(tmp_path, 2))
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="none of the run's checkpoints can be used") as caught:
        find_newest(tmp_path)
    assert "step-00000002: a file of the checkpoint was cut" in caught.value.found
    assert "step-00000001: the content of a file" in caught.value.found
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("version", "written_by", "said"),
    [(1, None, "hfdist an earlier version"), (4, None, "hfdist a later version"), (4, "7.1.0", "hfdist 7.1.0")],
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
    assert f"format 2 or 3, which hfdist {hfdist.__version__} reads" in str(caught.value)
    assert files_of(folder) == before
    with pytest.raises(FormatError):
        read_checkpoint(folder / "step-00000002", blank(small_pieces(2)))
    # An older one of another format is none that a run would go on from.
    newest = save(folder, 4)
    assert find_newest(folder) == newest
    assert (folder / "step-00000002").is_dir()


def test_of_a_link_the_link_alone_is_removed(tmp_path):
    """An old checkpoint may have been moved to another disk."""
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    for path in (save(folder, 1), save(folder, 2)):
        away = archive / path.name
        shutil.copytree(path, away)
        shutil.rmtree(path)
        path.symlink_to(away)
    before = files_of(archive)
    save(folder, 3)
    prune(folder, Keep(newest=2))
    assert steps(folder) == [2, 3]
    # By an earlier version, which renamed links and could not remove them.
    (folder / "step-00000001.tmp-0123abcd").symlink_to(archive / "step-00000001")
    (folder / "step-00000003.tmp-0123abcd").write_text("a file")
    (folder / "step-00000004").symlink_to(tmp_path / "gone")
    save(folder, 2)
    save(folder, 4)
    assert steps(folder) == [2, 3, 4]
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert files_of(archive) == before


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


@pytest.mark.parametrize(("newest", "names_the_latest"), [(1, False), (2, True), (9, False)])
def test_as_many_stay_as_there_is_room_for(tmp_path, newest, names_the_latest):
    one = save(tmp_path / "one", 1)
    for step in range(1, 6):
        path = shutil.copytree(one, tmp_path / "all" / f"step-{step:08d}")
        prune(path.parent, Keep(newest=newest, named=frozenset({path.name} if names_the_latest else ())))
        assert steps(path.parent) == [*range(max(step - newest, 0) + 1, step + 1)]


def unlist(path):
    (path / MANIFEST).write_text("{")


@pytest.mark.parametrize("damage", [cut, unlist, lambda path: (path / "config.json").unlink()])
@pytest.mark.parametrize("best", [False, True])
def test_what_cannot_be_read_takes_the_place_of_nothing_that_can(tmp_path, damage, best):
    for step, loss in enumerate([2.0, 3.0, 1.0, 0.5], start=1):
        save(tmp_path, step, state={"held_out_loss": loss})
    for step in (3, 4):
        damage(tmp_path / f"step-{step:08d}")
    prune(tmp_path, Keep(newest=1, best=best))
    assert steps(tmp_path) == ([1, 2, 3, 4] if best else [2, 3, 4])
    assert find_newest(tmp_path).name == "step-00000002"


def test_more_than_the_newest_may_be_kept(tmp_path):
    for step, loss in enumerate([4.0, 2.0, 3.0, None, 2.5, 3.5], start=1):
        save(tmp_path, step, state={"held_out_loss": loss})
        prune(tmp_path, Keep(newest=1, every=3, best=True))
    assert steps(tmp_path) == [2, 3, 6]
    prune(tmp_path, Keep(newest=1, best=True))
    assert steps(tmp_path) == [2, 6]
    (tmp_path / "step-00000002" / "training_state" / "state.json").write_text("{")
    prune(tmp_path, Keep(newest=1, best=True))
    # Left as it is: it is damaged, and nobody's best.
    assert steps(tmp_path) == [2, 6]
    save(tmp_path, 7)
    prune(tmp_path, Keep(newest=1, best=True))
    assert steps(tmp_path) == [2, 6, 7]


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


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["weight_map"].update(a="/etc/passwd"),
        lambda index: index["weight_map"].update(a="../../x"),
        lambda index: index["weight_map"].update(a="config.json"),
        lambda index: index["weight_map"].update(a=index["weight_map"]["b"]),
        lambda index: index["weight_map"].pop("a"),
        lambda index: index["weight_map"].update(a=3),
        lambda index: index.pop("weight_map"),
        lambda index: index.update(weight_map=[1]),
    ],
)
def test_a_tampered_index_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", 40)
    path = save(tmp_path, 1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    change(index)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        read_checkpoint(path, blank(small_pieces()))


def test_an_index_without_weights_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(save_plan, "MAX_MODEL_FILE_BYTES", 40)
    path = save(tmp_path, 1)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(DamagedError, match="the index of the weights is damaged"):
        read_checkpoint(path, blank(small_pieces()))


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": {"a": "x"}}', '{"steps": [], "state": {}, "format": 2}', "1"])
def test_a_damaged_state_is_refused(tmp_path, text):
    path = save(tmp_path, 1)
    (path / "training_state" / "state.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path, blank(small_pieces()))


def test_hashes_are_those_of_the_bytes(tmp_path):
    path = save(tmp_path, 1)
    files, found = json.loads((path / MANIFEST).read_text())["files"], json.loads((path / HASHES).read_text())
    found |= {name: [[0, record["bytes"], record["xxh128"]]] for name, record in files.items() if "xxh128" in record}
    assert found.keys() == files.keys() == files_of(path).keys() - {MANIFEST}
    for name, record in files.items():
        content, end = (path / name).read_bytes(), 0
        for begin, num_bytes, digest in found[name]:
            assert begin == end
            end += num_bytes
            assert xxhash.xxh3_128(content[begin:end]).hexdigest() == digest
        assert len(content) == end == record["bytes"]


# ---- checkpoints of the format before ----


@pytest.fixture
def of_format_2(tmp_path):
    """Of step 2, by two ranks; written by the code of that format."""
    return shutil.copytree(FORMAT_2, tmp_path / "step-00000002")


def test_the_format_before_is_read(of_format_2):
    assert find_newest(of_format_2.parent) == of_format_2
    verify(of_format_2)
    loaded = blank(small_pieces())
    assert read_checkpoint(of_format_2, loaded) == {"step": 2}
    assert all(torch.equal(a.view, b.view) for a, b in zip(loaded, small_pieces(2), strict=True))
    save(of_format_2.parent, 3)
    prune(of_format_2.parent, Keep(newest=2))
    assert steps(of_format_2.parent) == [2, 3]


@pytest.mark.parametrize("name", sorted(files_of(FORMAT_2)))
def test_what_changes_in_the_format_before_is_noticed(of_format_2, name):
    flip_a_bit(of_format_2 / name)
    with pytest.raises(CheckpointError):
        verify(of_format_2)
    with pytest.raises(CheckpointError, match="none of the run's checkpoints can be used"):
        find_newest(of_format_2.parent)


# ---- what is written can be read ----


def test_the_manifest_grows_with_files_and_not_with_what_the_ranks_write_of_them(tmp_path, monkeypatch):
    pieces = [whole(f"w{number:03d}", WEIGHT, torch.ones(3)) for number in range(300)]
    usual = save(tmp_path / "usual", 1, pieces)
    monkeypatch.setattr(write, "PART_BYTES", 1)
    path = save(tmp_path / "parts", 1, pieces)
    assert len(list_parts(path, read_manifest(path))) > 300 > 10 > len(list_parts(usual, read_manifest(usual)))
    assert abs((path / MANIFEST).stat().st_size - (usual / MANIFEST).stat().st_size) < 10
    verify(path)


def test_the_manifest_of_the_largest_models_is_small(tmp_path):
    """Llama 405B with Adam in float32, on 1,024 ranks: 2,435 files of tensors, and 3.5 million parts."""
    shared = {f"training_state/optimizer-{number:05d}-of-02435.safetensors": 2_000_000_000 for number in range(2435)}
    names = [f"training_state/{kind}-{rank:05d}.x" for kind in ("rng", "hashes") for rank in range(1024)]
    parts = [Part(name, 0, 300_000, "0" * 32) for name in names]
    Manifest(step=1, files=shared | {part.file: part.num_bytes for part in parts}, parts=parts).write(tmp_path)
    assert (tmp_path / MANIFEST).stat().st_size < 2**20
    manifest = read_manifest(tmp_path)
    assert (len(manifest.files), len(manifest.files_of_hashes)) == (2435 + 2048, 1024)


def link(path):
    (path / "vocab.txt").symlink_to(Path(__file__))


@pytest.mark.parametrize(
    ("largest", "write_files", "message"),
    [(10_000, str, "state.json.*10,000 bytes"), (300, str, "manifest.json"), (2**20, link, "vocab.txt")],
)
def test_what_could_not_be_read_again_is_no_checkpoint(tmp_path, monkeypatch, largest, write_files, message):
    """Neither what is too large for the reader, nor what it refuses; and those before it stay."""
    older = save(tmp_path, 1)
    before = files_of(tmp_path)
    monkeypatch.setattr("hfdist.checkpoint.manifest.MAX_JSON_BYTES", largest)
    state = {"lanes": "x" * largest} if write_files is str and largest > 1000 else {}
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        write_checkpoint(tmp_path, step=2, pieces=small_pieces(), state=state, write_model_files=write_files)
    assert "before it stay" in caught.value.hint
    assert os.listdir(tmp_path) == [older.name]
    assert files_of(tmp_path) == before


def test_a_file_whose_header_could_not_be_read_is_not_planned(monkeypatch):
    monkeypatch.setattr(safetensors_io, "_MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="header"):
        safetensors_io.plan_file({"w" * 100: safetensors_io.TensorSpec("w", WEIGHT, (1,), "F32")})
