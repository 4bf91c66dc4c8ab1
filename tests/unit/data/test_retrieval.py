"""Rows of queries and their texts: the names of their columns, their tokens, and which text of a batch is what."""

import json

import pytest
import torch
from tokenizers import normalizers

from hfdist.config.data import ChatConfig, RowFormat, TextsConfig
from hfdist.data.sources.base import BadRow, ContentError
from hfdist.data.sources.columns import kinds_of
from hfdist.data.sources.formats import texts_in
from hfdist.data.sources.rows import RowReader
from hfdist.data.tokenization.encoders import Encoders
from hfdist.models.loss.embedding_losses import NEGATIVE, POSITIVE, QUERY
from hfdist.tune.embed import Places
from tests.distributed.trl_runs import make_tokenizer
from tests.unit.data.test_preferences import tensors, words

ROW = {"query": "red cat", "positive": "a big bird", "negative": "now"}
FORM = {"query": "red cat", "documents": ["a big bird", "now"]}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def read(row):
    return RowReader(format=RowFormat.retrieval).read(row, where="row 1")


def encode(tokenizer, row, **texts):
    [tokens] = Encoders(tokenizer, ChatConfig(), TextsConfig(**texts)).encode_examples([read(row)])
    return tokens


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"anchor": "red cat", "positive": "a big bird", "negative": "now"},
        {"query": "red cat", "pos": ["a big bird"], "neg": ["now"]},
        {"query": "red cat", "positive": "a big bird", "negatives": ["now"], "id": 3},
        {"query": "red cat", "positive": "a big bird", "negative_1": "now", "negative_2": None},
    ],
)
def test_columns_have_the_names_that_libraries_give_them(row):
    assert json.loads(read(row)) == FORM
    reader = RowReader(format=RowFormat.retrieval)
    assert set(reader.columns(kinds_of([row]), where="file")) == set(row) - {"id"}
    assert texts_in(read(row)).split("\n") == ["red cat", "a big bird", "now"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"query": "red cat"}, "columns are missing"),
        (ROW | {"query": " "}, "the text is empty: query"),
        (ROW | {"negatives": ["now", 3]}, r"this is no text: negatives\[1\]"),
        ({"query": "red cat", "pos": ["a", "now"]}, "one text that belongs to its query: pos"),
    ],
)
def test_bad_rows_are_named(row, said):
    found = read(row)
    assert isinstance(found, BadRow)
    with pytest.raises(ContentError, match=said):
        raise found.error


def test_names_of_other_sets_are_proposed():
    reader = RowReader(format=RowFormat.retrieval)
    with pytest.raises(ContentError) as refused:
        reader.columns(kinds_of([{"question": "red", "answer": "cat"}]), where="file")
    assert refused.value.hint is not None
    assert "data.columns={query: question, positive: answer}" in refused.value.hint


def test_each_text_is_a_document_and_ends(tokenizer):
    batch = tensors(encode(tokenizer, ROW), length=12)
    ids = batch["input_ids"][0]
    assert words(tokenizer, ids[:9]) == ["red", "cat", "<end>", "a", "big", "bird", "<end>", "now", "<end>"]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2]
    found = Places.of(batch)
    assert found.kinds.tolist() == [QUERY, POSITIVE, NEGATIVE]
    assert found.last.tolist() == [2, 6, 8]


def test_texts_are_numbered_by_row_and_what_fills_up_is_none(tokenizer):
    pair = {"query": "red", "positive": "cat"}
    rows = [tensors(encode(tokenizer, ROW), encode(tokenizer, pair), length=16), tensors(length=16)]
    rows.append(tensors(encode(tokenizer, pair), length=16))
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    found = Places.of(batch)
    assert found.kinds.tolist() == [QUERY, POSITIVE, NEGATIVE, QUERY, POSITIVE, QUERY, POSITIVE]
    assert found.rows.tolist() == [0, 0, 0, 0, 0, 2, 2]
    assert found.among_row().tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_prompts_stand_before_texts_and_long_ones_keep_their_end(tokenizer):
    tokens = encode(tokenizer, ROW, query_prompt="the ", document_prompt="then ", max_tokens=4)
    ids = tensors(tokens, length=16)["input_ids"][0]
    assert words(tokenizer, ids[:11]) == [
        "the",
        "red",
        "cat",
        "<end>",
        "then",
        "a",
        "big",
        "<end>",
        "then",
        "now",
        "<end>",
    ]


def test_what_decides_the_tokens_is_in_the_digest(tokenizer):
    def digest(**texts):
        return Encoders(tokenizer, ChatConfig(), TextsConfig(**texts)).digest(examples=True)

    assert digest() == Encoders(tokenizer, ChatConfig()).digest(examples=True)
    assert len({digest(), digest(max_tokens=4), digest(query_prompt="a "), digest(document_prompt="a ")}) == 4


def test_a_text_without_a_token_is_a_bad_row():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("now", "")
    [refused] = Encoders(tokenizer, ChatConfig()).encode_examples([read(ROW)])
    assert isinstance(refused, ContentError)
    assert refused.found == "now"
