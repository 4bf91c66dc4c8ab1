"""Files that grow beside checkpoints: what is new is sent, few packs hold it, and they come back as they were."""

import json
import os
import random
import shutil
from dataclasses import replace

import pytest

from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.manifest import DamagedError
from hfdist.checkpoint.mirror import Mirror, Objects, packs
from hfdist.checkpoint.mirror.listed import Content, ListedCheckpoint
from hfdist.errors import ResourceError
from tests.unit.checkpoint.pieces import files_of, save


class Run:
    """A folder whose files grow, checkpoints, and their mirror."""

    def __init__(self, folder):
        self.folder, self.address = folder / "run", f"file://{folder}/mirror"
        self.mirror, self.step = Mirror(Objects(self.address)), 0
        self.folder.mkdir()

    def add(self, name, data):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def send(self):
        """Give the bytes that are sent besides those of the checkpoint."""
        self.step += 1
        path = save(self.folder.parent / "checkpoints", self.step)
        plain = Mirror(Objects(f"{self.address}-plain")).send(path).new_bytes
        beside = {name: self.folder / name for name in files_of(self.folder)}
        return self.mirror.send(path, lambda sent: None, beside).new_bytes - plain

    def listed(self):
        name = f"{step_name(self.step)}.json"
        objects = Objects(self.address)
        return ListedCheckpoint.from_bytes(objects.read(name, objects.list()[name]), "")

    def fetched(self, target, step=None):
        target.mkdir()
        Mirror(Objects(self.address)).fetch_beside(step_name(step or self.step), target)
        return files_of(target)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_only_what_is_new_is_sent_and_few_packs_hold_it(run, tmp_path):
    data, sent, before = random.Random(0), [], {}
    for step in range(1, 31):
        for name in ("metrics.jsonl", "ledger/lane-00000.records", "ledger/lane-00001.records"):
            run.add(name, data.randbytes(500 + 37 * step))
        sent.append(run.send())
        before[step] = files_of(run.folder)
    whole = sum(map(len, before[30].values()))
    # Each byte about as often as there are sizes of packs, in place of half of 30 times.
    assert sum(sent) < 5 * whole
    assert len(run.listed().packs) <= 6
    for step in (1, 7, 30):
        assert run.fetched(tmp_path / f"{step}", step) == before[step]


def test_a_file_that_was_emptied_comes_back_empty(run, tmp_path):
    """As a rollback sets all lines of a file aside."""
    run.add("lines", b"one\n" * 50)
    run.add("large", bytes(40_000))
    run.send()
    (run.folder / "lines").write_bytes(b"")
    assert run.send() > 0
    assert run.fetched(tmp_path / "emptied") == files_of(run.folder)
    # Nothing is new.
    assert run.send() == 0
    run.add("lines", b"two\n")
    run.send()
    assert run.fetched(tmp_path / "again") == files_of(run.folder)


def test_a_file_that_was_changed_is_sent_anew_and_others_are_not(run, tmp_path):
    run.add("large", bytes(40_000))
    run.add("lines", b"one\ntwo\nthree\n" * 20)
    run.send()
    (run.folder / "lines").write_bytes(b"one\n")
    run.add("lines", b"other\n" * 100)
    assert 600 <= run.send() < 1_000
    assert run.fetched(tmp_path / "again") == files_of(run.folder)
    (run.folder / "lines").write_bytes(b"shorter\n")
    run.send()
    assert run.fetched(tmp_path / "shorter") == files_of(run.folder)


def test_files_that_have_not_changed_are_not_read_again(run, tmp_path, monkeypatch):
    names, read = ("metrics.jsonl", "ledger/lane-00000.records"), []
    hash_part = packs._hash
    monkeypatch.setattr(packs, "_hash", lambda path, part: read.append(path.name) or hash_part(path, part))
    for name in names:
        run.add(name, b"line\n" * 100)
    run.send()
    # They may have changed again in the same moment.
    run.send()
    assert sorted(read) == sorted(name.rpartition("/")[2] for name in names)
    for name in names:
        os.utime(run.folder / name, (1, 1))
    run.send()
    read.clear()
    run.add(names[0], b"more\n")
    run.send()
    assert read == [names[0]]
    # As long as before.
    (run.folder / names[1]).write_bytes(b"Line\n" * 100)
    run.send()
    assert run.fetched(tmp_path / "again") == files_of(run.folder)


def test_what_is_too_large_is_refused_before_anything_comes(run, tmp_path, monkeypatch):
    run.add("lines", b"line\n")
    run.send()
    monkeypatch.setattr(packs, "_MOST_PACKS", 0)
    with pytest.raises(DamagedError, match="too many files"):
        run.fetched(tmp_path / "many")
    monkeypatch.undo()
    # More than the disk has, by a list that names one pack again and again.
    found, free = run.listed(), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=found.packs[0].num_bytes * 99))
    forged = replace(found, packs=[*found.packs] * 100)
    Objects(run.address).write({f"{step_name(1)}.json": forged.to_bytes()})
    with pytest.raises(ResourceError, match="no room"):
        run.fetched(tmp_path / "large")
    assert not [*files_of(tmp_path / "many"), *files_of(tmp_path / "large")]


def test_no_record_goes_through_a_link(run, tmp_path):
    run.add("ledger/lane-00000.records", b"record")
    run.send()
    for folder in ("target", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "target/ledger").symlink_to(tmp_path / "out")
    with pytest.raises(DamagedError, match="leads out"):
        run.mirror.fetch_beside(step_name(1), tmp_path / "target")
    assert not list((tmp_path / "out").iterdir())


def test_a_process_goes_on_after_the_packs_that_it_has_brought(run, tmp_path):
    run.add("large", random.Random(1).randbytes(50_000))
    run.send()
    run.mirror = Mirror(Objects(run.address))
    (tmp_path / "brought").mkdir()
    run.mirror.fetch_beside(step_name(1), tmp_path / "brought")
    run.add("large", b"new" * 100)
    assert run.send() < 1_000
    # Not where a pack was lost.
    first = run.listed().packs[0]
    (tmp_path / "mirror" / first.name).unlink()
    run.add("large", b"more" * 100)
    assert run.send() > 50_000
    assert run.fetched(tmp_path / "again") == files_of(run.folder)


def test_a_large_file_is_in_several_packs(run, tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "CONTENT_BYTES", 2_000)
    monkeypatch.setattr(packs, "_MOST_HEAD_BYTES", 1_000)
    run.add("large", random.Random(2).randbytes(4_500))
    run.add("small", b"small")
    run.send()
    assert [content.num_bytes > 1_000 for content in run.listed().packs] == [True] * 4 + [False]
    assert run.fetched(tmp_path / "again") == files_of(run.folder)
    run.add("small", b"er")
    assert run.send() < 700


@pytest.mark.parametrize(
    ("parts", "data", "why"),
    [
        ([["../out", 0, 2]], b"ab", "leads out"),
        ([["/tmp/out", 0, 2]], b"ab", "leads out"),
        ([["\ud800", 0, 2]], b"ab", "leads out"),
        ([["name", 5, 2]], b"ab", "lacks the bytes before"),
        ([["name", -1, 2]], b"ab", "is damaged"),
        ([["name", 0, 3]], b"ab", "is damaged"),
        ([["name", 0]], b"ab", "is damaged"),
        ("none", b"ab", "is damaged"),
        ([["name", 0, 1], ["name/below", 0, 1]], b"ab", "cannot be made"),
    ],
)
def test_what_is_no_pack_is_refused(parts, data, why, run, tmp_path):
    run.send()
    pack = json.dumps(parts).encode() + b"\n" + data
    content, objects = Content.of(pack), Objects(run.address)
    found = run.listed()
    forged = ListedCheckpoint(step=1, digest=found.digest, held_out_loss=None, files=found.files, packs=[content])
    objects.write({content.name: pack, f"{step_name(1)}.json": forged.to_bytes()})
    with pytest.raises(DamagedError, match=why):
        run.fetched(tmp_path / "target")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_comes_where_its_packs_are_lost_or_changed(run, tmp_path):
    run.add("lines", b"line\n")
    run.send()
    (content,) = run.listed().packs
    place = tmp_path / "mirror" / content.name
    place.write_bytes(b"x" * content.num_bytes)
    with pytest.raises(DamagedError, match="have changed"):
        run.fetched(tmp_path / "changed")
    place.unlink()
    with pytest.raises(DamagedError, match="lacks files beside"):
        run.fetched(tmp_path / "lost")
    run.mirror.fetch(step_name(1), tmp_path / "elsewhere")
    run.send()
    assert run.fetched(tmp_path / "again") == {"lines": b"line\n"}
