"""Rewards see the columns that the format does not read: of training prompts and of held-out ones."""

import json
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.data.documents.corpus import open_corpus
from hfdist.data.documents.examples import take_examples
from hfdist.data.documents.held_out import build_held_out
from hfdist.data.stream.token_stream import DOCUMENTS, TokenStream
from hfdist.data.tokenization.text_encoder import text_digest
from tests.unit.data.corpora import tokenizer

TIME = datetime(2026, 1, 1)
ROWS = [
    {
        "prompt": f"{n} + 1 = ",
        "completion": f"{n + 1}",
        "level": n % 3,
        "tests": [{"in": n}],
        "at": datetime(2026, 1, 1),
    }
    for n in range(40)
]
SEEN = {f"{row['prompt']}{row['completion']}": {"level": row["level"], "tests": row["tests"]} for row in ROWS}


def make_config(tmp_path, kind, *overrides):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        rows = [{name: value for name, value in row.items() if name != "at"} for row in ROWS]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    shape = ("data.eval_fraction=0.3", "data.lanes=1", "data.workers=0", "data.sequence_length=16")
    return compose_config(
        ["task=grpo", "model=tiny", "task.rewards={arithmetic: 1.0}", f"data={path}", *shape, *overrides],
        name="tune",
    ).data


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_prompt_has_the_columns_of_its_row(tmp_path, cache_dir, kind):
    config = make_config(tmp_path, kind)
    corpus = open_corpus(config)
    stream, seen = TokenStream(corpus, tokenizer(), config), []
    at = {"at": "2026-01-01T00:00:00"} if kind == "parquet" else {}
    batches = iter(stream.loader(batch_size=2))
    for _ in range(10):
        batch = next(batches)
        for ids, mask, number in zip(
            batch["input_ids"], batch["attention_mask"], batch[DOCUMENTS].tolist(), strict=True
        ):
            text = tokenizer().decode(ids[: int(mask.sum())], skip_special_tokens=True)
            assert corpus.columns([number]) == {number: SEEN[text.strip()] | at}
            seen.append(text)
    held_out = take_examples(build_held_out(corpus, tokenizer(), config), 5)
    assert len(held_out) == 5
    for example in held_out:
        text = tokenizer().decode(example.prompt + example.reference, skip_special_tokens=True)
        assert example.columns == SEEN[text] | at
        assert text not in seen


def test_equal_examples_fall_on_one_side(tmp_path, cache_dir):
    """Whatever their other columns are."""
    config = make_config(tmp_path, "jsonl", "data.eval_fraction=0.5")
    rows = [row | {"level": level} for row in ROWS for level in (1, 2)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({name: value for name, value in row.items() if name != "at"}) + "\n" for row in rows)
    )
    corpus = open_corpus(config)
    sides = [corpus.is_held_out(text_digest(corpus.text(number))) for number in range(len(rows))]
    assert sides[::2] == sides[1::2]
    assert len(set(sides)) == 2
    assert [corpus.columns([number])[number]["level"] for number in (0, 1)] == [1, 2]


def test_they_are_kept_for_rewards_alone(tmp_path):
    assert make_config(tmp_path, "jsonl").keep_columns
    assert open_corpus(make_config(tmp_path, "jsonl", "data.keep_columns=false")).columns([0]) == {0: {}}
    shared = ["task=dpo", "model=tiny", f"data={tmp_path / 'rows.jsonl'}"]
    assert not compose_config(shared, name="tune").data.keep_columns
