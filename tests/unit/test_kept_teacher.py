"""What is kept of a teacher lies where the targets are, is found again, and is refused where a file is damaged."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskName
from hfdist.errors import CheckpointError, ResourceError
from hfdist.tune import kept_teacher
from hfdist.tune.document_table import places
from hfdist.tune.kept_teacher import KeptTeacher
from hfdist.tune.reference import ReferenceTable

COUNT, VOCABULARY = 3, 11
TASK = TaskConfig(name=TaskName.distill, teacher="teacher", teacher_top_k=COUNT)


def make_batch():
    """Three documents in two rows: targets 2, 1 and 3; the last row has no positions of a second one."""
    labels = torch.full((2, 6), IGNORED)
    labels[0, 1:3], labels[0, 5], labels[1, 2:5] = 4, 7, 9
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    return {"input_ids": torch.arange(12).view(2, 6), "labels": labels, "position_ids": positions}


def make_table(folder, task=TASK):
    table = KeptTeacher(folder, None, task)
    table._vocabulary = VOCABULARY
    return table


def write(folder, batch):
    """Write a number of its own for each target."""
    table, numbers = make_table(folder), np.arange(6, dtype=np.int32)
    ids = (numbers[:, None] + np.arange(COUNT, dtype=np.int32)) % VOCABULARY
    logs = -np.repeat(numbers[:, None], COUNT + 1, 1).astype(np.float32)
    table._note_taught(batch, ids, logs)
    table._write(0)
    return ids, logs


@pytest.mark.parametrize("is_turned", [False, True])
def test_targets_get_what_was_said_of_them(tmp_path, is_turned):
    batch = make_batch()
    ids, logs = write(tmp_path, batch)
    table = make_table(tmp_path)
    table._read()
    assert table.num_documents == 3
    # Documents are found wherever they are.
    asked = {name: tensor.flip(0) for name, tensor in batch.items()} if is_turned else batch
    order = [3, 4, 5, 0, 1, 2] if is_turned else range(6)
    with table.rows(table.prepare(asked)) as rows:
        known = rows.part((asked["labels"][:, 1:] != IGNORED).flatten())
    assert known.ids.tolist() == ids[list(order)].tolist()
    assert known.log_probabilities.tolist() == logs[list(order)].tolist()


def test_other_documents_and_other_teachers_are_not_known(tmp_path):
    batch = make_batch()
    write(tmp_path, batch)
    table = make_table(tmp_path)
    table._read()
    # The same tokens with another target.
    batch["labels"][1, 2] = IGNORED
    with pytest.raises(CheckpointError, match="the data have changed"):
        table.prepare(batch)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    task, names = TaskConfig(name=TaskName.distill, teacher=str(teacher), teacher_top_k=COUNT), []
    for value in (0.0, 0.0, 1.0):
        save_file({"weight": np.full(5, value)}, teacher / "model.safetensors")
        names.append(make_table(tmp_path, task)._model)
    # Another teacher has come into the same folder.
    assert names[0] == names[1] != names[2]
    warmer = make_table(
        tmp_path, TaskConfig(name=TaskName.distill, teacher="teacher", teacher_top_k=3, temperature=2.0)
    )
    warmer._read()
    assert warmer.num_documents == 0


def shorter(columns):
    columns["ids"] = columns["ids"][:-1]


def strange(columns):
    columns["ids"][0, 0] = VOCABULARY


def unordered(columns):
    columns["starts"][1] = 99


def begins_late(columns):
    columns["starts"][0] = -1


def without_starts(columns):
    del columns["starts"]


@pytest.mark.parametrize("damage", [shorter, strange, unordered, begins_late, without_starts, "half"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    batch = make_batch()
    write(tmp_path, batch)
    [path] = tmp_path.glob("rank-*.safetensors")
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        columns = load_file(path)
        damage(columns)
        save_file(columns, path, metadata={"model": make_table(tmp_path)._model})
    table = make_table(tmp_path)
    with pytest.raises(CheckpointError, match="likeliest tokens is damaged") as refused:
        table._read()
        table.prepare(batch)
    assert refused.value.where == str(path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": "MODEL", "num_sequences": [1]}'])
def test_a_damaged_note_of_what_is_known_does_not_count(tmp_path, content):
    """All documents are looked for again."""
    write(tmp_path, make_batch())
    table = make_table(tmp_path)
    (tmp_path / "known.json").write_text(content.replace('"MODEL"', json.dumps(table._model)))
    table._read_kept()
    assert table._num_sequences == {}
    assert table.num_documents == 3


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_teacher.shutil, "disk_usage", lambda _: type("", (), {"free": 100}))
    with pytest.raises(ResourceError, match="no room") as refused:
        write(tmp_path, make_batch())
    assert refused.value.hint.startswith("task.teacher_top_k=1")


def test_files_are_numbered_on(tmp_path):
    for batch in (make_batch(), {**make_batch(), "input_ids": torch.arange(12).view(2, 6) + 1}):
        write(tmp_path, batch)
    table = make_table(tmp_path)
    table._read()
    assert table.num_documents == 6
    assert len(list(places(batch))) == 3


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"half"])
def test_a_damaged_file_of_the_reference_is_refused(tmp_path, content):
    table = ReferenceTable(tmp_path, "model")
    table._learned = known = {1: -0.5, 2: -1.0}
    table._write(0)
    [path] = tmp_path.glob("rank-*.npz")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    with pytest.raises(CheckpointError, match="log-probabilities is damaged") as refused:
        ReferenceTable(tmp_path, "model")._read()
    assert refused.value.where == str(path)
    path.write_bytes(whole)
    again = ReferenceTable(tmp_path, "model")
    again._read()
    assert again._known == known


def test_a_rank_writes_what_it_has_learned_and_nothing_of_others(tmp_path):
    """A file of all ranks' documents for each rank would grow with the square of their number."""
    tables = [ReferenceTable(tmp_path, "model") for _ in range(2)]
    for start in range(2):
        for rank, table in enumerate(tables):
            table._learned = {10 * start + rank: -1.0 - rank}
        for rank, table in enumerate(tables):
            table._write(rank)
        for table in tables:
            table._read()
            assert len(table._known) == 2 * (start + 1)
    assert tables[0]._read_file(tmp_path / "rank-00001.npz") == {1: -2.0, 11: -2.0}
