"""What a kill leaves in the ledger's files after the last checkpoint is cut off, wherever it has cut a write."""

import json

import numpy as np
import pytest

from hfdist.config.data import BadRows
from hfdist.data.order.records import RECORD, Status
from hfdist.data.packing.sequence import Problem
from hfdist.data.stream.ledger import Ledger, bad_rows_file, read_records, records_file
from tests.unit.data.streams import memory_config, memory_corpus

LANE = 3
COUNTED = 2
"""Sequences of the last checkpoint."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return memory_corpus(memory_config(tmp_path_factory.mktemp("cache")), a=["text"] * 12)


def piece(sequence):
    """Record of document 1, whose 5 tokens are all in a sequence."""
    return sequence, 1, 0, 5, 5, 0, 0, Status.trained


def write(folder, corpus, sequences):
    """A bad row and a piece in each sequence; the problem holds what some take for an end of a line."""
    ledger = Ledger(folder, corpus, BadRows.quarantine)
    for sequence in sequences:
        bad = (sequence, sequence, 0, 0, 0, 0, 0, Status.bad)
        records = np.array([bad, piece(sequence)], dtype=RECORD)
        ledger.add(LANE, records, [Problem(sequence, f"no\u2028JSON: {{{sequence}}}")])
    ledger.flush()
    return records_file(folder, LANE).read_bytes(), bad_rows_file(folder, LANE).read_bytes()


def test_what_a_training_that_went_back_had_read_of_other_data_is_not_written(tmp_path, corpus):
    ledger = Ledger(tmp_path, corpus, BadRows.skip)
    for _ in range(2):
        # The second time after a rollback to the same checkpoint, of the old data.
        ledger.set_aside([LANE], 10)
        ledger.add(LANE, np.array([piece(10), piece(11)], dtype=RECORD), ())
    ledger.flush()
    assert read_records(tmp_path, LANE)["sequence"].tolist() == [10, 11]


def test_a_new_file_survives_a_power_cut_with_its_name(tmp_path, corpus, monkeypatch):
    synced = []
    monkeypatch.setattr("hfdist.data.stream.ledger.sync", synced.append)
    ledger = Ledger(tmp_path, corpus, BadRows.skip)
    for sequence in range(2):
        ledger.add(LANE, np.array([piece(sequence)], dtype=RECORD), ())
        ledger.flush()
    assert synced == [tmp_path]


def test_a_write_that_was_cut_anywhere_is_done_again(tmp_path, corpus):
    saved, whole = (write(tmp_path / str(end), corpus, range(end)) for end in (COUNTED, 4))
    killed = tmp_path / "killed"
    killed.mkdir()
    # Of a list of files that was under way.
    (killed / f"files-{corpus.inventory.digest}.jsonl.x7.tmp").touch()
    cuts = [(end, len(saved[1])) for end in range(len(saved[0]), len(whole[0]))]
    cuts += [(len(whole[0]), end) for end in range(len(saved[1]), len(whole[1]))]
    for records_end, rows_end in cuts:
        records_file(killed, LANE).write_bytes(whole[0][:records_end])
        bad_rows_file(killed, LANE).write_bytes(whole[1][:rows_end])
        Ledger(killed, corpus, BadRows.quarantine).go_back({LANE: COUNTED})
        assert (records_file(killed, LANE).read_bytes(), bad_rows_file(killed, LANE).read_bytes()) == saved, rows_end
    assert write(killed, corpus, range(COUNTED, 4)) == whole
    assert {path.name for path in killed.iterdir()} == {path.name for path in (tmp_path / "4").iterdir()}
    # Zeros, as some file systems leave them where a write was under way.
    path = bad_rows_file(killed, LANE)
    path.write_bytes(saved[1] + b"\0" * 40 + b"\n")
    Ledger(killed, corpus, BadRows.quarantine).go_back({LANE: COUNTED})
    assert path.read_bytes() == saved[1]
    assert [json.loads(line)["sequence"] for line in whole[1].splitlines()] == [0, 1, 2, 3]


def test_what_a_save_counts_is_written_by_itself_and_in_order(tmp_path, corpus):
    ledger = Ledger(tmp_path, corpus, BadRows.error)

    def add(sequence):
        ledger.add(LANE, np.array([piece(sequence)], dtype=RECORD), ())

    def sequences():
        return read_records(tmp_path, LANE)["sequence"].tolist()

    add(0)
    ledger.count()
    add(1)
    ledger.write_counted()
    assert sequences() == [0]
    ledger.count()
    add(2)
    # Without the thread that was to write it: nothing is left out, nothing is written twice.
    ledger.flush()
    ledger.write_counted()
    assert sequences() == [0, 1, 2]
    add(3)
    ledger.count()
    ledger.go_back({LANE: 1})
    ledger.flush()
    assert sequences() == [0]
