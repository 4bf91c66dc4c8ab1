"""Where the lanes stand: columns that are read as they were written, the JSON of older checkpoints, damaged files."""

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hfdist.checkpoint import read_state
from hfdist.checkpoint.lanes_file import LANES_FILE, read_lanes, write_lanes
from hfdist.checkpoint.manifest import DamagedError, Manifest
from hfdist.data import Cursor
from hfdist.data.order.lane_state import LaneState, Place, Progress
from hfdist.errors import CheckpointError
from tests.unit.data.streams import Run, memory_config, memory_corpus
from tests.unit.data.test_golden_stream import text, tokenizer

OF_THREE_RANKS = Path(__file__).with_name("lanes_in_state") / "step-00000003"
"""Of hfdist before there was the file: in the middle of the data of the test below."""


def cursor():
    lanes = {
        lane: LaneState(
            digest=2**64 - 1 - lane,
            pools=tuple(Progress(Place(1, 300 * lane, 70_000), 2**33 + pool, 5, 6) for pool in range(3)),
            sequences=lane,
        )
        for lane in range(4)
    }
    return Cursor(identity="a", contents="b", num_lanes=4, samples=6, lanes=lanes, next_lane=2)


def read(folder):
    return read_lanes(folder, Manifest(step=1, files={LANES_FILE: 1}, parts=[]))


def test_places_are_read_as_they_were_written(tmp_path):
    head, columns = cursor().to_columns()
    write_lanes(tmp_path, columns)
    found = Cursor.from_json(json.loads(json.dumps(head)), read(tmp_path))
    assert dict(found.lanes) == cursor().lanes
    assert (found.samples, found.next_lane, found.num_lanes) == (6, 2, 4)


def test_a_file_is_written_as_the_others_are(tmp_path):
    write_lanes(tmp_path, cursor().to_columns()[1])
    (other := tmp_path / "other").write_bytes(b"")
    # Readable for those who may read the rest.
    assert (tmp_path / LANES_FILE).stat().st_mode == other.stat().st_mode
    (tmp_path / LANES_FILE).unlink()
    (tmp_path / LANES_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_lanes(tmp_path, cursor().to_columns()[1])


def test_the_cursors_of_ranks_are_joined():
    whole = cursor()
    parts = [replace(whole, lanes={lane: whole.lanes[lane] for lane in own}) for own in ((1, 3), (0, 2), (0, 2))]
    joined = Cursor.merge([Cursor.from_bytes(part.to_bytes()) for part in parts])
    assert joined.to_json() == whole.to_json()
    with pytest.raises(CheckpointError, match="lanes are missing"):
        Cursor.merge([Cursor.from_bytes(parts[0].to_bytes())])


def test_an_older_checkpoint_has_its_places_in_json(tmp_path):
    assert read_lanes(tmp_path, Manifest(step=1, files={}, parts=[])) is None
    assert Cursor.from_json(json.loads(json.dumps(cursor().to_json())), None) == cursor()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_run_of_other_ranks_goes_on_from_an_older_checkpoint_and_from_a_new_one(num_ranks, tmp_path):
    config = memory_config(tmp_path / "cache", weights={"a": 2.0, "b": 1.0})
    corpus = memory_corpus(config, a=[text(n) for n in range(90)], b=[text(n) for n in range(7, 60)])
    own = Run(corpus, config, 1, encoder=tokenizer()).state()
    # A library may give a corpus another name, and not another order.
    state = read_state(OF_THREE_RANKS)["cursor"] | {name: own[name] for name in ("identity", "contents")}
    head, columns = Cursor.from_json(state).to_columns()
    write_lanes(tmp_path, columns)
    for at, places in ((state, read_lanes(OF_THREE_RANKS)), (head, read(tmp_path))):
        run = Run(corpus, config, num_ranks, at, columns=places, encoder=tokenizer())
        given = [run.step()["input_ids"].numpy().tobytes() for _ in range(2)]
        assert hashlib.blake2b(b"".join(given), digest_size=8).hexdigest() == "a084a902b0ff0206"


def test_a_head_without_its_columns_is_refused():
    head, columns = cursor().to_columns()
    with pytest.raises(CheckpointError, match="file of the lanes is missing"):
        Cursor.from_json(head)
    with pytest.raises(CheckpointError, match="another format"):
        Cursor.from_json(cursor().to_json(), columns)
    with pytest.raises(CheckpointError, match="damaged"):
        Cursor.from_json(head, columns | {"epoch": columns["epoch"][:2]})
    with pytest.raises(CheckpointError, match="damaged"):
        Cursor.from_json(head, columns | {"lane": np.zeros_like(columns["lane"])})


def test_a_long_column_takes_no_memory_beside_its_own():
    columns = {**cursor().to_columns()[1], "lane": np.zeros(2**20, dtype=np.uint8)}
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="damaged"):
            Cursor.from_json(cursor().to_columns()[0], columns)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", ["header", "cut", "type"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    write_lanes(tmp_path, cursor().to_columns()[1])
    file = tmp_path / LANES_FILE
    if damage == "header":
        file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        save_file({"lane": np.zeros(4, dtype=np.float32)}, file)
    with pytest.raises(DamagedError):
        read(tmp_path)
