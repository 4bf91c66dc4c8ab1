"""What an error of a row proposes: to leave the row out, or, where all are so, to write them in another way."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.data import TokenStream, open_corpus
from hfdist.data.documents.bad_rows import quarantine, with_way_out
from hfdist.errors import DataError
from hfdist.run.data import count_max_steps
from tests.unit.data.corpora import tokenizer

ROWS = [{"text": f"row {number}"} for number in range(4)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def read(path, lanes=1):
    config = compose_config([f"data={path}", f"data.lanes={lanes}", "model=tiny", "data.sequence_length=8"]).data
    stream = TokenStream(open_corpus(config), tokenizer(), config, global_batch_size=1)
    for _, batch in zip(range(9), stream, strict=False):
        assert batch


def test_a_quarantined_row_ends_no_count_of_steps(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + b'{"text": 3}\n')
    lines = [f"data={path}", "data.lanes=1", "model=tiny", "data.sequence_length=8", "train.epochs=1"]
    counts = []
    for more in ("data.on_bad_rows=skip", "data.quarantine=[files:rows.jsonl:4]"):
        config = compose_config(
            [*lines, "train.max_steps=null", "train.global_batch_size=1", "train.micro_batch_size=1", more]
        )
        counts.append(count_max_steps(config, open_corpus(config.data), tokenizer()))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (LINES + b'{"text": 3}\n', "data.on_bad_rows=skip, or 'data.quarantine="),
        (LINES + b'{"text": "\xe9"}\n', "iconv -f ISO-8859-1 -t UTF-8 .* > NEW, if .*, or data.on_bad_rows=skip"),
        (b'{"text": "\xe9"}\n' * 4, "iconv -f ISO-8859-1 -t UTF-8 .* > NEW, if that is its encoding$"),
        (json.dumps(ROWS).encode(), "rows as JSON objects, a line each: python -c .* > NEW.jsonl$"),
        (json.dumps(ROWS, indent=1).encode(), "rows as JSON objects, a line each: python -c .* > NEW.jsonl$"),
        ("\n".join(json.dumps(row, indent=1) for row in ROWS).encode(), "a line each: jq -c . < .* > NEW.jsonl$"),
        (b"question,answer\n1,2\n3,4\n", "a line each: python -c .*read_csv.* > NEW.jsonl$"),
        (b"{'text': 'a'}\n" * 4, "json.dumps"),
        (b"plain text\n" * 4, "rows as JSON objects, a line each$"),
        (b'{"text": 3}\n' * 4, None),
    ],
)
@pytest.mark.parametrize("lanes", [1, 9])
def test_a_hint_fits_the_file(tmp_path, content, hint, lanes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path, lanes)
    if lanes == 9 and content.startswith(LINES):
        assert caught.value.hint.startswith("data.lanes=")
        return
    assert re.search(hint, caught.value.hint) if hint else caught.value.hint is None
    is_here = shutil.which("jq") or "jq -c" not in (hint or "")
    if "> NEW.jsonl" in (hint or "") and lanes == 1 and is_here:
        command = caught.value.hint.partition(": ")[2]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=environment)
        rows = [json.loads(line) for line in (tmp_path / "NEW.jsonl").read_text().splitlines()]
        assert rows == ROWS or rows == [{"question": "1", "answer": "2"}, {"question": "3", "answer": "4"}]


def test_a_file_beside_others_may_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(DataError, match="not JSON") as caught:
        read(tmp_path)
    assert "data.on_bad_rows=skip, or 'data.quarantine=[files:b.jsonl:0]'" in caught.value.hint


def test_rows_of_files_with_strange_names_can_be_taken_out():
    rows = [f"stdlib:{name}:0" for name in ("a.jsonl", "a, b.jsonl", "it's.txt", 'x\\"=y.txt', "x\\", "[ü].txt")]
    assert compose_config(shlex.split(quarantine(rows))).data.quarantine == rows


def test_no_command_is_given_for_a_packed_file(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.hint == "rows as JSON objects, a line each"


def test_a_first_run_without_rows_is_passed_over(tmp_path):
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "rows.parquet", schema) as writer:
        for rows in ([], ["a"]):
            writer.write_table(pa.table({"text": rows}, schema=schema))
    with pytest.raises(DataError, match="fewer documents than lanes"):
        read(tmp_path / "rows.parquet", lanes=2)


@pytest.mark.parametrize("name", ["it's.jsonl", 'a "b", c.jsonl', "plain.jsonl"])
def test_the_override_that_takes_a_row_out_is_read_by_the_shell_and_the_config(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(LINES + b'{"text": 3}\n')
    lines = ["data=files", "data.lanes=1", "model=tiny"]
    config = compose_config([*lines, f"data.sources.files.path={tmp_path}", "data.on_bad_rows=skip"])
    shard = open_corpus(config.data).shards[0][1]
    (row,) = shard.read([4])
    error = with_way_out(row.error, shard, f"files:{name}:4", is_alone=False)
    proposed = shlex.split(error.hint)[-1]
    config = compose_config([*lines, f"data.sources.files.path={tmp_path}", proposed])
    assert open_corpus(config.data).quarantined == {4}
