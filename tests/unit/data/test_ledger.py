"""What a kill leaves in the ledger's files behind the last checkpoint is cut off, wherever it has cut a write."""

import json

import pytest

from hfdist.config.data import BadRows
from hfdist.data.ledger import Ledger, bad_rows_file, records_file
from hfdist.data.records import Fate, Piece, make_records
from tests.unit.data.streams import memory_config, memory_corpus

LANE = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return memory_corpus(memory_config(tmp_path_factory.mktemp("cache")), a=["one", "two", "three"])


def write(folder, corpus, sequences):
    """A bad row and a piece in each sequence; the problem holds what some would take for an end of a line."""
    ledger = Ledger(folder, corpus, BadRows.quarantine)
    for sequence in sequences:
        records = make_records([Piece(sequence % 3, 0, Fate.bad), Piece(1, 0, Fate.trained, 0, 5, 5)])
        records["sequence"] = sequence
        ledger.add(LANE, records, (f"no\u2028JSON: {{{sequence}}}",))
    ledger.flush()
    return ledger


def files(folder):
    return records_file(folder, LANE).read_bytes(), bad_rows_file(folder, LANE).read_bytes()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_write_that_was_cut_anywhere_is_done_again(tmp_path, corpus, count):
    write(tmp_path / "whole", corpus, range(5))
    whole = files(tmp_path / "whole")
    write(tmp_path / "killed", corpus, range(count)) if count else None
    begins = files(tmp_path / "killed") if count else (b"", b"")
    for number, (content, begin) in enumerate(zip(whole, begins, strict=True)):
        assert content.startswith(begin)
        for end in range(len(begin), len(content)):
            folder = tmp_path / "cut"
            folder.mkdir(exist_ok=True)
            for path, text in zip((records_file(folder, LANE), bad_rows_file(folder, LANE)), whole, strict=True):
                path.write_bytes(text)
            (records_file, bad_rows_file)[number](folder, LANE).write_bytes(content[:end])
            Ledger(folder, corpus, BadRows.quarantine).go_back({LANE: count})
            assert files(folder) == begins, end
    write(tmp_path / "cut", corpus, range(count, 5))
    assert files(tmp_path / "cut") == whole
    assert [json.loads(line)["sequence"] for line in whole[1].decode().split("\n")[:-1]] == list(range(5))
