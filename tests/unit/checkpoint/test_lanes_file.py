"""Where the lanes stand: columns that are read as they were written, the JSON of older checkpoints, damaged files."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from hfdist.checkpoint.lanes_file import LANES_FILE, read_lanes, write_lanes
from hfdist.checkpoint.manifest import DamagedError, Manifest
from hfdist.data import Cursor
from hfdist.data.order.lane_state import LaneState, Place, Progress
from hfdist.errors import CheckpointError


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


def test_an_older_checkpoint_has_its_places_in_json(tmp_path):
    assert read_lanes(tmp_path, Manifest(step=1, files={}, parts=[])) is None
    assert Cursor.from_json(json.loads(json.dumps(cursor().to_json())), None) == cursor()


def test_a_head_without_its_columns_is_refused():
    head, columns = cursor().to_columns()
    with pytest.raises(CheckpointError, match="another format"):
        Cursor.from_json(head)
    with pytest.raises(CheckpointError, match="damaged"):
        Cursor.from_json(head, columns | {"epoch": columns["epoch"][:2]})
    with pytest.raises(CheckpointError, match="damaged"):
        Cursor.from_json(head, columns | {"lane": np.zeros_like(columns["lane"])})


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
