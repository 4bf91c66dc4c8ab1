"""A mirror is whole at every moment, in real stores; and what comes back from it is what was sent, or nothing."""

import errno
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
from dataclasses import replace

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from hfdist.checkpoint import Keep, prune
from hfdist.checkpoint.folder import list_checkpoints, step_name
from hfdist.checkpoint.manifest import DamagedError, hash_of_content, verify
from hfdist.checkpoint.mirror import Mirror, Objects, Uploader, fetch_best, fetch_newer
from hfdist.checkpoint.mirror import mirror as of_mirror
from hfdist.checkpoint.mirror.listed import CONTENT_BYTES, ListedCheckpoint
from hfdist.data.storage.network import Network, Retries
from hfdist.errors import CheckpointError, ResourceError
from tests.hub_server import User, hub
from tests.marks import many
from tests.unit.checkpoint.pieces import files_of, save
from tests.unit.data.servers import ProxyHandler, running, s3, s3_server

__all__ = ["hub", "s3", "s3_server"]

QUICK = Network(Retries(attempts=3, first_wait_seconds=0.01))
TWO = Keep(newest=2)


def mirror_at(address):
    return Mirror(Objects(address, Network(QUICK.retries)))


def send(mirror, path, keep=TWO):
    sent = mirror.send(path)
    mirror.prune(replace(keep, named=frozenset([path.name])))
    return sent


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of four steps, the third with the lowest held-out loss."""
    folder = tmp_path_factory.mktemp("written")
    for step, loss in {1: 4.0, 2: 3.0, 3: 1.0, 4: 2.0}.items():
        save(folder, step, state={"held_out_loss": loss})
    return folder


@pytest.fixture
def saved(written, tmp_path):
    """The same checkpoints once more, by their steps."""
    shutil.copytree(written, tmp_path / "run")
    return {step: tmp_path / "run" / step_name(step) for step in (1, 2, 3, 4)}


@pytest.fixture(params=["file", "memory", "s3", "hf"])
def address(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://corpus/mirror/run"
    if request.param == "hf":
        server = request.getfixturevalue("hub")
        server.store.users["token"] = User("me")
        request.getfixturevalue("monkeypatch").setenv("HF_TOKEN", "token")
        server.store.add("me/mirror", {"README.md": b"of the repository"})
        return "hf://me/mirror/run"
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        return "memory://mirror/run"
    return f"file://{tmp_path}/mirror/run"


def test_a_checkpoint_comes_back_as_it_was_and_equal_contents_are_sent_once(address, saved, tmp_path):
    mirror = mirror_at(address)
    assert mirror.open() == []
    first, second = send(mirror, saved[1]), send(mirror, saved[2])
    assert first.new_bytes == first.done_bytes == first.all_bytes
    # The config is the same file.
    assert 0 < second.new_bytes <= second.all_bytes - (saved[2] / "config.json").stat().st_size
    assert send(mirror, saved[2]).new_bytes == 0
    again = mirror_at(address)
    assert again.open() == [step_name(1), step_name(2)]
    for step in (1, 2):
        found = again.fetch(step_name(step), tmp_path / "elsewhere")
        assert files_of(found) == files_of(saved[step])
    send(mirror, saved[3])
    assert again.open() == [step_name(2), step_name(3)]
    # Only what the two lists name is left, beside what describes the mirror.
    there = Objects(address).list()
    lists = [
        ListedCheckpoint.from_bytes(Objects(address).read(f"{name}.json", there[f"{name}.json"]), "")
        for name in again.open()
    ]
    needed = {content.name for found in lists for content in found.contents()}
    assert there.keys() == needed | {"mirror.json", "writer", *(f"{name}.json" for name in again.open())}
    # A process that begins is the only one that writes from there on, also where another is sending.
    with pytest.raises(CheckpointError, match="another run has begun"):
        mirror.send(saved[4], lambda sent: again.claim())
    for write in (lambda: mirror.send(saved[4]), lambda: mirror.prune(Keep(newest=1))):
        with pytest.raises(CheckpointError, match="another run has begun"):
            write()
    again.prune(Keep(newest=2))
    assert Objects(address).list().keys() == there.keys()
    send(again, saved[4])
    assert mirror.open() == [step_name(3), step_name(4)]


def test_large_files_travel_in_parts(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(of_mirror, "CONTENT_BYTES", 1000)
    mirror, told = mirror_at(f"file://{tmp_path}/mirror"), []
    mirror.open()
    sent = mirror.send(saved[1], told.append)
    assert [progress.done_bytes for progress in told] == sorted(progress.done_bytes for progress in told)
    assert told[-1] == sent
    assert sent.done_bytes == sum(map(len, files_of(saved[1]).values()))
    assert files_of(mirror.fetch(step_name(1), tmp_path / "elsewhere")) == files_of(saved[1])


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(newest=1), [4]),
        (Keep(newest=2), [3, 4]),
        (Keep(newest=1, best=True), [3, 4]),
        (Keep(newest=1, every=2), [2, 4]),
    ],
)
def test_what_stays_is_what_stays_in_the_folder(keep, left, saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    for path in saved.values():
        send(mirror, path, keep)
    assert mirror.open() == [step_name(step) for step in left]
    for step in left:
        verify(mirror.fetch(step_name(step), tmp_path / "elsewhere"))


def test_another_checkpoint_of_the_same_step_takes_its_place(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[2])
    other = save(tmp_path / "again", 2, state={"held_out_loss": 7.0})
    assert send(mirror, other).new_bytes > 0
    assert files_of(mirror.fetch(step_name(2), tmp_path / "elsewhere")) == files_of(other)
    # A run that went back to an earlier step keeps that one, and the newest.
    send(mirror, saved[4], Keep(newest=1))
    send(mirror, saved[1], Keep(newest=1))
    assert mirror.open() == [step_name(1), step_name(4)]


# ---- kills ----


def in_child(action, started=lambda child: None):
    """Do something in another process, once `started` has its id; whether it came to its end, and was not killed."""
    may_begin, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(may_begin, 1)
            action()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    started(child)
    os.write(tells, b"x")
    os.close(tells)
    os.close(may_begin)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def check_what_a_kill_left(address, saved, before, after, folder):
    """Each checkpoint that is listed is whole, and one is; the next run completes the mirror; give what it sends."""
    survivor = mirror_at(address)
    names = survivor.open()
    assert names in ([before], [before, after], [after])
    for name in names:
        found = survivor.fetch(name, folder)
        assert files_of(found) == files_of(saved[name])
        shutil.rmtree(found)
    sent = send(survivor, saved[after], Keep(newest=1))
    assert survivor.open() == [after]
    assert files_of(survivor.fetch(after, folder)) == files_of(saved[after])
    shutil.rmtree(folder)
    return sent.new_bytes


@pytest.mark.parametrize("every", [3, many(1)])
def test_killed_at_every_moment_of_an_upload_to_files(saved, tmp_path, every):
    by_name = {path.name: path for path in saved.values()}
    alone = mirror_at(f"file://{tmp_path}/alone")
    alone.open()
    send(alone, saved[2], Keep(newest=1))
    left = files_of(tmp_path / "alone").keys()
    new_bytes = []
    for moment in range(0, 1000, every):
        root = tmp_path / f"mirror-{moment}"
        send(mirror_at(f"file://{root}"), saved[1], Keep(newest=1))

        def upload(root=root, moment=moment):
            events = iter(range(1000))

            def hook(event, arguments):
                # Before the system is asked to do something in the mirror.
                is_there = event in EVENTS and str(root) in str(arguments[0])
                if is_there and next(events) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            send(mirror_at(f"file://{root}"), saved[2], Keep(newest=1))

        is_done = in_child(upload)
        new_bytes.append(
            check_what_a_kill_left(f"file://{root}", by_name, step_name(1), step_name(2), tmp_path / "elsewhere")
        )
        assert files_of(root).keys() == left
        shutil.rmtree(root)
        if is_done:
            break
    assert moment >= 14
    # What a killed upload had sent is not sent again.
    assert new_bytes == sorted(new_bytes, reverse=True)
    assert new_bytes[0] > 0 == new_bytes[-1]


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.move", "os.listdir", "os.scandir")


class KillingProxy(ProxyHandler):
    """Kills the process whose `moment` has come: before a request reaches the store, or before its answer comes."""

    victim, moment, count = 0, -1, 0

    def answer(self, path):
        kind = type(self)
        kind.kill()
        answer = super().answer(path)
        kind.kill()
        return answer

    @classmethod
    def kill(cls):
        if cls.victim and cls.count == cls.moment:
            os.kill(cls.victim, signal.SIGKILL)
        cls.count += 1


@pytest.mark.many
def test_killed_at_every_moment_of_an_upload_to_s3(saved, s3_server, s3, tmp_path, monkeypatch):
    """Before each request, and between what it does and its answer."""
    by_name = {path.name: path for path in saved.values()}
    with running(type("Proxy", (KillingProxy,), {"target": s3_server})) as proxy:
        kind = proxy.RequestHandlerClass
        for moment in range(1000):
            address = f"s3://corpus/mirror-{moment}"
            send(mirror_at(address), saved[1], Keep(newest=1))

            def upload(address=address, moment=moment):
                monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
                send(mirror_at(address), saved[2], Keep(newest=1))

            kind.count, kind.moment = 0, moment
            is_done = in_child(upload, started=lambda child: setattr(kind, "victim", child))
            kind.victim = 0
            check_what_a_kill_left(address, by_name, step_name(1), step_name(2), tmp_path / "elsewhere")
            if is_done:
                break
    assert moment >= 14


# ---- what is not as it was ----


def rewrite_list(folder, name, change):
    """Change what a list says, so that it agrees with itself."""
    path = folder / f"{name}.json"
    values = json.loads(path.read_text())
    del values["xxh128"]
    change(values)
    path.write_text(json.dumps(values | {"xxh128": hash_of_content(values)}))


def rename_file(to):
    return lambda values: values["files"].update({to: values["files"].pop("config.json")})


def set_size(num_bytes):
    return lambda values: values["files"]["config.json"][0].__setitem__(0, num_bytes)


def set_hash(xxh128):
    return lambda values: values["files"]["config.json"][0].__setitem__(1, xxh128)


@pytest.mark.parametrize(
    "change",
    [
        rename_file("../config.json"),
        rename_file("/tmp/config.json"),
        rename_file("a/../../config.json"),
        rename_file("a" * 300),
        rename_file("other.json"),
        lambda values: values["files"].update({"other.json": values["files"]["config.json"]}),
        rename_file("model.safetensors/config.json"),
        rename_file("."),
        rename_file("a\0"),
        rename_file("training_state"),
        set_size(-1),
        set_size(1),
        set_size(CONTENT_BYTES + 1),
        set_size("2"),
        set_hash("../../mirror.json"),
        set_hash("0" * 32),
        set_hash(7),
        lambda values: values["files"].update({"config.json": [[2]]}),
        lambda values: values.update(files=[]),
        lambda values: values.update(files={}),
        lambda values: values.update(files={name: [] for name in values["files"]}),
        lambda values: values.update(step="1"),
        lambda values: values.pop("digest"),
        lambda values: values.update(digest="0"),
    ],
)
def test_a_list_that_lies_brings_nothing(change, saved, tmp_path):
    mirror, folder = mirror_at(f"file://{tmp_path}/mirror"), tmp_path / "elsewhere"
    send(mirror, saved[1])
    send(mirror, saved[2])
    rewrite_list(tmp_path / "mirror", step_name(2), change)
    before = files_of(tmp_path / "mirror")
    with pytest.raises(DamagedError):
        mirror.fetch(step_name(2), folder)
    assert not folder.exists() or list(folder.iterdir()) == []
    assert fetch_newer(mirror, mirror.open(), folder) == folder / step_name(1)
    assert files_of(folder / step_name(1)) == files_of(saved[1])
    assert files_of(tmp_path / "mirror") == before


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"1", b"[" * 100_000, b'{"xxh128": 1}', b"\xff"])
def test_what_is_no_list_brings_nothing_and_keeps_all_contents_until_it_is_old(text, saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    (tmp_path / "mirror" / f"{step_name(3)}.json").write_bytes(text)
    contents = files_of(tmp_path / "mirror/contents")
    with pytest.raises(DamagedError):
        mirror.fetch(step_name(3), tmp_path / "elsewhere")
    send(mirror, saved[2], Keep(newest=1))
    # Nobody knows what the damaged list needs.
    assert files_of(tmp_path / "mirror/contents").items() >= contents.items()
    assert mirror.fetch(step_name(2), tmp_path / "elsewhere")
    send(mirror, saved[4], Keep(newest=1))
    assert mirror.open() == [step_name(4)]
    sent = mirror_at(f"file://{tmp_path}/other")
    send(sent, saved[4])
    assert files_of(tmp_path / "mirror/contents") == files_of(tmp_path / "other/contents")


def test_a_list_that_lacks_a_content_goes_once_a_newer_one_is_whole(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    for path in (tmp_path / "mirror/contents").iterdir():
        path.unlink()
    send(mirror, saved[2])
    assert mirror.open() == [step_name(2)]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_content_that_is_damaged_is_passed_over_and_sent_again(damage, saved, tmp_path, caplog):
    mirror, folder = mirror_at(f"file://{tmp_path}/mirror"), tmp_path / "elsewhere"
    send(mirror, saved[1])
    send(mirror, saved[2])
    # The weights are those of step 2 alone.
    [[_, own]] = json.loads((tmp_path / "mirror" / f"{step_name(2)}.json").read_text())["files"]["model.safetensors"]
    content = tmp_path / "mirror/contents" / own
    if damage == "gone":
        content.unlink()
    else:
        content.write_bytes(content.read_bytes()[:-1] + (b"?" if damage == "changed" else b""))
    with caplog.at_level(logging.WARNING, "hfdist"):
        assert fetch_newer(mirror, mirror.open(), folder) == folder / step_name(1)
    assert f"{step_name(2)} of the mirror is passed over" in caplog.text
    assert [path.name for path in folder.iterdir()] == [step_name(1)]
    # With nothing sound there, and nothing here.
    (tmp_path / "mirror" / f"{step_name(1)}.json").unlink()
    with pytest.raises(CheckpointError, match="none of the mirror's checkpoints can be used"):
        fetch_newer(mirror, mirror.open(), tmp_path / "nowhere")
    # The same process sends it again, and so repairs the mirror.
    assert send(mirror, saved[2]).new_bytes > 0
    assert files_of(mirror.fetch(step_name(2), tmp_path / "again")) == files_of(saved[2])


def test_all_contents_that_have_changed_are_mended_at_once(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    before = files_of(tmp_path / "mirror")
    for path in (tmp_path / "mirror/contents").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedError):
        mirror.fetch(step_name(1), tmp_path / "elsewhere")
    send(mirror, saved[1])
    assert files_of(tmp_path / "mirror") == before


def test_a_look_makes_no_mirror(tmp_path):
    assert mirror_at(f"file://{tmp_path}/mirror").names() == []
    assert not (tmp_path / "mirror").exists()


def test_a_checkpoint_here_that_is_as_new_stays(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    for path in saved.values():
        send(mirror, path)
    before = files_of(tmp_path / "run")
    assert fetch_newer(mirror, mirror.open(), tmp_path / "run") is None
    assert files_of(tmp_path / "run") == before
    shutil.rmtree(saved[4])
    assert fetch_newer(mirror, mirror.open(), tmp_path / "run") == saved[4]
    assert files_of(tmp_path / "run") == before


@pytest.mark.parametrize("damaged", ["model.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_here_hides_none_of_the_mirror(damaged, saved, tmp_path):
    mirror, folder = mirror_at(f"file://{tmp_path}/mirror"), tmp_path / "run"
    send(mirror, saved[3])
    send(mirror, saved[4])
    whole = files_of(saved[4])
    (saved[4] / damaged).unlink()
    left = files_of(saved[4])
    assert fetch_newer(mirror, mirror.open(), folder) == saved[4]
    assert files_of(saved[4]) == whole
    [aside] = folder.glob(f"{step_name(4)}.bad-*")
    assert files_of(aside) == left
    # Where the mirror has nothing better, nothing is renamed.
    (saved[4] / damaged).unlink()
    for path in (tmp_path / "mirror/contents").iterdir():
        path.unlink()
    assert fetch_newer(mirror, mirror.open(), folder) is None
    assert list(folder.glob("*.bad-*")) == [aside]


def test_the_best_comes_too_unless_the_folder_has_it(saved, tmp_path, caplog):
    mirror, folder = mirror_at(f"file://{tmp_path}/mirror"), tmp_path / "elsewhere"
    for path in saved.values():
        send(mirror, path, Keep(newest=1, best=True))
    names = mirror.open()
    assert fetch_newer(mirror, names, folder) == folder / step_name(4)
    assert fetch_best(mirror, names, folder) == folder / step_name(3)
    assert files_of(folder / step_name(3)) == files_of(saved[3])
    assert fetch_best(mirror, names, folder) is None
    shutil.rmtree(folder / step_name(3))
    for path in (tmp_path / "mirror/contents").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert fetch_best(mirror, names, folder) is None
    assert f"{step_name(3)} of the mirror is passed over" in caplog.text


def test_a_disk_without_room_is_said_before_anything_comes(saved, tmp_path, monkeypatch):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    (tmp_path / "elsewhere").mkdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match="no room for the checkpoint of the mirror"):
        mirror.fetch(step_name(1), tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_disk_that_gets_full_on_the_way_is_no_damage(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # In the middle of the largest content.
    largest = max(map(len, files_of(saved[1]).values()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 10, before[1]))
    try:
        with pytest.raises(ResourceError, match="no room"):
            mirror.fetch(step_name(1), tmp_path / "elsewhere")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_mirror_of_a_later_version_is_left_alone(saved, tmp_path):
    (tmp_path / "mirror").mkdir()
    for text in ('{"format": 2}', "{", "[]", ""):
        (tmp_path / "mirror/mirror.json").write_text(text)
        with pytest.raises(CheckpointError, match="another format"):
            mirror_at(f"file://{tmp_path}/mirror").open()


# ---- what a store does ----


@pytest.mark.parametrize(
    ("status", "said"), [(403, "HTTP 403, after 1 attempt"), (503, "HTTP 503, after 3 attempts"), (507, "HTTP 507")]
)
def test_a_store_that_refuses_is_said_in_one_message(status, said, s3, saved):
    mirror = mirror_at("s3://corpus/run")
    send(mirror, saved[1])
    s3.faults[f"/corpus/run/{step_name(2)}.json"] = [status] * 100
    with pytest.raises(ResourceError, match=said) as caught:
        mirror.send(saved[2])
    assert caught.value.where == "s3://corpus/run"
    assert caught.value.hint
    # All but the list is there.
    s3.faults.clear()
    assert mirror.open() == [step_name(1)]
    assert mirror.send(saved[2]).new_bytes == 0
    assert mirror.open() == [step_name(1), step_name(2)]


def test_a_store_that_lets_nobody_remove_is_said(s3, saved, monkeypatch):
    mirror = mirror_at("s3://corpus/run")
    send(mirror, saved[1])
    call = S3FileSystem._call_s3

    async def refuse(store, method, *arguments, **named):
        if method == "delete_objects":
            return {"Errors": [{"Key": one["Key"], "Code": "AccessDenied"} for one in named["Delete"]["Objects"]]}
        return await call(store, method, *arguments, **named)

    monkeypatch.setattr(S3FileSystem, "_call_s3", refuse)
    before = Objects("s3://corpus/run").list()
    with pytest.raises(ResourceError, match="cannot be pruned") as caught:
        send(mirror, saved[2], Keep(newest=1))
    assert "the right to remove objects" in caught.value.hint
    # No content of a list that stays was asked to go.
    assert mirror.open() == [step_name(1), step_name(2)]
    assert Objects("s3://corpus/run").list().items() >= before.items()


def test_a_write_that_fails_leaves_no_part_of_it(tmp_path, monkeypatch):
    store = mirror_at(f"file://{tmp_path}/mirror")
    store.open()

    def fill(self, path, value, **named):
        with self.open(path, "wb") as file:
            file.write(value[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", fill)
    with pytest.raises(ResourceError, match="it is full"):
        Objects(f"file://{tmp_path}/mirror").write({"contents/0": b"text"})
    assert list((tmp_path / "mirror/contents").iterdir()) == []


def test_a_bucket_that_is_not_there(s3):
    with pytest.raises(ResourceError, match="HTTP 404"):
        mirror_at("s3://nowhere/run").open()


def test_what_is_lost_while_it_is_sent_is_no_checkpoint(saved, tmp_path):
    mirror = mirror_at(f"file://{tmp_path}/mirror")
    send(mirror, saved[1])
    told = []

    def lose(sent):
        told.append(sent)
        if len(told) > 1:
            # As a rule of the bucket does, or another run with the same mirror.
            for path in (tmp_path / "mirror/contents").iterdir():
                path.unlink()

    with pytest.raises(CheckpointError, match="has lost a part of what was sent"):
        mirror.send(saved[2], lose)
    assert mirror.open() == [step_name(1)]
    assert mirror.send(saved[2]).new_bytes > 0
    assert mirror.open() == [step_name(1), step_name(2)]


# ---- beside the training ----


class Gate(Objects):
    """A store that answers once it is let, and may refuse."""

    def __init__(self, address):
        super().__init__(address, QUICK)
        self.is_open, self.refuses = threading.Event(), False

    def write(self, contents):
        self.is_open.wait(60)
        if self.refuses:
            raise ResourceError("the mirror cannot be written: HTTP 403", where=self.shown)
        super().write(contents)


def test_a_store_that_hangs_hinders_nobody_and_the_newest_comes_next(saved, tmp_path):
    store = Gate(f"file://{tmp_path}/mirror")
    uploader = Uploader(Mirror(store), TWO)
    for path in saved.values():
        uploader.put(path)
    # One may be on its way, whichever the thread took first; of those that came meanwhile, only the newest waits.
    held = uploader.held
    assert step_name(4) in held
    assert len(held) <= 2
    assert not uploader.wait(0)
    store.is_open.set()
    assert uploader.wait(60)
    assert uploader.held == frozenset()
    uploads = uploader.take_uploads()
    assert uploads[-1].step == uploader.newest_step == 4
    assert not any(upload.has_failed for upload in uploads)
    assert uploader.take_uploads() == []


def test_a_failure_is_counted_and_the_next_upload_makes_it_good(saved, tmp_path, caplog):
    store = Gate(f"file://{tmp_path}/mirror")
    store.is_open.set()
    uploader = Uploader(Mirror(store), TWO)
    ends = []
    with caplog.at_level(logging.WARNING, "hfdist"):
        for step, store.refuses in ((1, False), (2, True), (3, True), (4, False)):
            uploader.put(saved[step])
            assert uploader.wait(60)
            ends += uploader.take_uploads()
    assert [(end.step, end.has_failed, end.num_failures, end.newest_step) for end in ends] == [
        (1, False, 0, 1),
        (2, True, 1, 1),
        (3, True, 2, 1),
        (4, False, 2, 4),
    ]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert all("has not got step-" in warning and "HTTP 403" in warning for warning in warnings)


def test_a_step_that_is_there_from_before_does_not_hide_a_failure(saved, tmp_path, caplog):
    """A run that went back may save a step anew."""
    store = Gate(f"file://{tmp_path}/mirror")
    store.is_open.set()
    store.refuses = True
    uploader = Uploader(Mirror(store), TWO, newest_step=4)
    with caplog.at_level(logging.WARNING, "hfdist"):
        uploader.put(saved[4])
        assert uploader.wait(60)
    assert "has not got step-00000004" in caplog.text


class Small(Gate):
    """A store with room for so many bytes."""

    room = 0

    def write(self, contents):
        for name, content in contents.items():
            if self.refuses and name.startswith("step-"):
                raise ResourceError("the mirror cannot be written: HTTP 503", where=self.shown)
            if sum(self.list().values()) + len(content) > self.room:
                raise ResourceError("the mirror cannot be written: it is full", where=self.shown)
            Objects.write(self, {name: content})


def test_what_a_failed_upload_has_left_does_not_fill_the_store(tmp_path):
    # Half of each is its own.
    saved = {step: save(tmp_path / "run", step, state={"text": str(step) * 20_000}) for step in (1, 2, 3, 4)}
    store = Small(f"file://{tmp_path}/mirror")
    store.room = int(1.9 * sum(map(len, files_of(saved[1]).values())))
    uploader = Uploader(Mirror(store), Keep(newest=1))
    ends = []
    for step, store.refuses in ((1, False), (2, True), (3, False), (4, False)):
        uploader.put(saved[step])
        assert uploader.wait(60)
        ends += uploader.take_uploads()
    assert [end.has_failed for end in ends] == [False, True, False, False]


def test_what_is_given_up_leaves_a_whole_mirror(saved, tmp_path):
    store = Gate(f"file://{tmp_path}/mirror")
    store.is_open.set()
    uploader = Uploader(Mirror(store), TWO)
    uploader.put(saved[1])
    assert uploader.wait(60)
    store.is_open.clear()
    uploader.put(saved[2])
    uploader.end()
    uploader.put(saved[3])
    store.is_open.set()
    assert uploader.wait(60)
    assert mirror_at(store.address).open() in ([step_name(1)], [step_name(1), step_name(2)])
    assert [upload.step for upload in uploader.take_uploads()] in ([1], [1, 2])


def test_a_checkpoint_that_is_being_sent_is_not_pruned(saved, tmp_path):
    prune(tmp_path / "run", Keep(newest=1, held=frozenset([step_name(1)])))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [step_name(1), step_name(4)]
