"""Whatever happens to a checkpoint's files: it is noticed before they are used, and an older one is used."""

import json
import os
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch

from hfdist.checkpoint import find_newest, read_checkpoint, restore_random_state, verify
from hfdist.errors import CheckpointError
from hfdist.testing import run_ranks
from tests.unit.checkpoint.pieces import blank, edit_manifest, files_of, save, small_pieces

pytestmark = pytest.mark.distributed

MANIFEST, MODEL, STATE = "manifest.json", "model.safetensors", "training_state/state.json"
OPTIMIZER = "training_state/optimizer-00001-of-00001.safetensors"
OLDER, NEWER = "step-00000001", "step-00000002"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        run_ranks(save, 2, folder, step, small_pieces(step), {"step": step})
    assert len(list((folder / NEWER).rglob("rng-*"))) == 2
    return folder


def check_fallback(folder):
    """The newer checkpoint of `folder` is damaged: see that it is passed over and kept as it is."""
    older, damaged = files_of(folder / OLDER), files_of(folder / NEWER)
    assert find_newest(folder) == folder / OLDER
    (aside,) = folder.glob(f"{NEWER}.bad-*")
    assert files_of(aside) == damaged
    assert files_of(folder / OLDER) == older
    assert sorted(os.listdir(folder)) == [OLDER, aside.name]
    aside.rename(folder / NEWER)


def check_use(path, value):
    """The checkpoint holds what was saved."""
    loaded = blank(small_pieces(value))
    assert read_checkpoint(path, loaded) == {"step": value}
    assert all(torch.equal(a.view, b.view) for a, b in zip(loaded, small_pieces(value), strict=True))


# ---- single bits ----


def check_flips(folder, flips):
    for name, bit in flips:
        file = folder / NEWER / name
        good = file.read_bytes()
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        try:
            check_fallback(folder)
        except AssertionError as error:
            raise AssertionError(f"bit {bit} of {name} was not noticed") from error
        file.write_bytes(good)
    assert find_newest(folder) == folder / NEWER
    check_use(folder / NEWER, 2)


def draw_flips(folder, count, seed):
    """Each file as often as any other, however small."""
    generator, sizes = random.Random(seed), {name: len(data) for name, data in files_of(folder / NEWER).items()}
    names = [sorted(sizes)[number % len(sizes)] for number in range(count)]
    return [(name, generator.randrange(8 * sizes[name])) for name in names]


def test_any_bit_that_flips_is_noticed(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    check_flips(tmp_path, draw_flips(tmp_path, 42, seed=0))


@pytest.mark.faults
@pytest.mark.parametrize("name", [MANIFEST, STATE, MODEL, OPTIMIZER])
def test_every_bit_of_a_file(checkpoints, tmp_path, name):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    check_flips(tmp_path, [(name, bit) for bit in range(8 * (tmp_path / NEWER / name).stat().st_size)])


# ---- whole files ----


def cut(path):
    path.write_bytes(path.read_bytes()[: random.Random(path.name).randrange(path.stat().st_size)])


def zero(path):
    """What a power cut leaves of a file whose content never came to the disk."""
    path.write_bytes(bytes(path.stat().st_size))


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    """Opening one waits for ever."""
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [cut, zero, Path.unlink, make_folder, make_pipe])
def test_any_file_that_is_changed_or_gone_is_noticed(checkpoints, tmp_path, change):
    for name in files_of(checkpoints / NEWER):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(checkpoints, folder)
        change(folder / NEWER / name)
        with pytest.raises(CheckpointError):
            verify(folder / NEWER)
        assert find_newest(folder) == folder / OLDER, name
        assert len(os.listdir(folder)) == 2


def test_files_that_changed_places_are_noticed(checkpoints, tmp_path):
    """Of equal size, so that only what is in them tells them apart."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    one, other = (tmp_path / NEWER / f"training_state/rng-{rank:05d}.safetensors" for rank in (0, 1))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    # Ranks that were forked alike have drawn alike.
    other.write_bytes(first if first != second else first[::-1])
    check_fallback(tmp_path)


def test_files_of_another_step_are_noticed(checkpoints, tmp_path):
    """All of them, the manifest too."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / OLDER, tmp_path / NEWER, dirs_exist_ok=True)
    check_fallback(tmp_path)


def test_files_that_the_manifest_does_not_list_are_never_read(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    path = tmp_path / NEWER
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    (path / "notes.txt").write_text("mine")
    (path / "training_state" / "rng-00002.safetensors").write_bytes(b"not one")
    (path / "training_state" / "optimizer-00002-of-00002.safetensors").write_bytes(b"not one")
    before = files_of(path)
    assert find_newest(tmp_path) == path
    check_use(path, 2)
    assert run_ranks(restore_random_state, 2, path) == [True, True]
    assert files_of(path) == before


# ---- absurd numbers ----

MOST_SECONDS = 10
MORE_BYTES = 256 * 2**20
"""That a process may ask for, beyond what it has, to find out that a file is not what it says."""
STEPS = '"steps": {'


def tell(change):
    """Change what the manifest says, so that it agrees with itself."""
    return lambda path: edit_manifest(path, change)


def edit_record(**values):
    """Of the model's file, in the manifest."""
    return tell(lambda content: content["files"][MODEL].update(values))


def edit_header(change):
    def apply(path):
        data = (path / MODEL).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (path / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


def set_step(text):
    """Of a parameter, in the training state."""
    return lambda path: (path / STATE).write_text((path / STATE).read_text().replace('"a": 14', f'"a": {text}'))


def overwrite(name, data):
    return lambda path: (path / name).write_bytes(data)


def make_huge(name):
    """A terabyte without content, which takes no room on the disk."""
    return lambda path: os.truncate(path / name, 10**12)


def name_twice(path):
    """Of two ranks' files, one hides the other."""
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace("rng-00000", "rng-00001"))


NOT_ONE = {
    "bytes": edit_record(bytes=10**15),
    "negative bytes": edit_record(bytes=-1),
    "a list of sizes": edit_record(bytes=[1]),
    "a long hash": edit_record(bytes=1, parts=[[1, "0" * 10**6]]),
    "a part of nothing": edit_record(parts=[[-1, ""]]),
    "a fraction": edit_record(bytes=2.5, parts=[[2.5, ""]]),
    "infinite": edit_record(bytes=float("inf"), parts=[[float("inf"), ""]]),
    "many digits": overwrite(MANIFEST, b'{"format": 2, "step": 2, "files": {"x": {"bytes": 1' + b"0" * 10**6),
    "a negative step": tell(lambda content: content.update(step=-2)),
    "a huge step": tell(lambda content: content.update(step=10**15)),
    "a long name": tell(lambda content: content["files"].update({"x" * 10**5: content["files"][MODEL]})),
    "deep": overwrite(MANIFEST, b"[" * 10**6),
    "deep objects": overwrite(MANIFEST, b'{"a":' * 10**6),
    "a huge manifest": make_huge(MANIFEST),
    "a huge state": make_huge(STATE),
    "a huge model": make_huge(MODEL),
    "no files": tell(lambda content: content.update(files={})),
    "a file twice": name_twice,
}
"""What `find_newest` passes over."""

NOT_READ = {
    "many digits": set_step("1" + "0" * 400),
    "infinite": set_step("1e999"),
    "negative": set_step("-14"),
    "a fraction": set_step("13.5"),
    "a switch": set_step("true"),
    "deep": overwrite(STATE, b"[" * 10**6),
    "a huge state": make_huge(STATE),
    "a long header": overwrite(MODEL, (2**63 - 1).to_bytes(8, "little") + b"{}"),
    "a header as long as a file": lambda path: (
        overwrite(MODEL, (10**9).to_bytes(8, "little"))(path),
        os.truncate(path / MODEL, 2 * 10**9),
    ),
    "a huge shape": edit_header(lambda header: header["a"].update(shape=[10**15, 10**15])),
    "a huge offset": edit_header(lambda header: header["a"].update(data_offsets=[0, 10**15])),
    "an infinite shape": edit_header(lambda header: header["a"].update(shape=[float("inf")])),
    "an empty huge shape": edit_header(lambda header: header["count"].update(shape=[0, 10**18])),
}
"""What `read_checkpoint` refuses by itself, if a manifest is made to agree."""


def limit_memory():
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE_BYTES, resource.RLIM_INFINITY))


def find_all(folders):
    limit_memory()
    found = []
    for folder in folders:
        begin = time.monotonic()
        found.append((find_newest(folder), time.monotonic() - begin))
    return found


def test_absurd_sizes_are_passed_over_at_once(checkpoints, tmp_path):
    for name, damage in NOT_ONE.items():
        shutil.copytree(checkpoints, tmp_path / name)
        damage(tmp_path / name / NEWER)
    (answers,) = run_ranks(find_all, 1, [tmp_path / name for name in NOT_ONE], group=False)
    for name, (found, seconds) in zip(NOT_ONE, answers, strict=True):
        assert found == tmp_path / name / OLDER, name
        assert len(os.listdir(tmp_path / name)) == 2
        assert seconds < MOST_SECONDS, name


def read_all(paths):
    limit_memory()
    refused = []
    for path in paths:
        begin, pieces = time.monotonic(), blank(small_pieces(2))
        with pytest.raises(CheckpointError):
            read_checkpoint(path, pieces)
        # Not a part of it, either.
        assert all((piece.view == -1).all() for piece in pieces)
        refused.append(time.monotonic() - begin)
    return refused


def test_absurd_sizes_are_not_read(checkpoints, tmp_path):
    for name, damage in NOT_READ.items():
        shutil.copytree(checkpoints / NEWER, tmp_path / name)
        damage(tmp_path / name)
    (answers,) = run_ranks(read_all, 1, [tmp_path / name for name in NOT_READ], group=False)
    assert max(answers) < MOST_SECONDS, dict(zip(NOT_READ, answers, strict=True))
