"""Rows of preferences as tokens: two documents in one example, whose targets say which answer they are of."""

import json

import numpy as np
import pytest
import torch

from hfdist.config.data import ChatConfig, RowFormat
from hfdist.data import marks
from hfdist.data.order.lane_state import Place
from hfdist.data.order.records import make_records
from hfdist.data.packing.sequence import IGNORED, PackedSequence
from hfdist.data.sources.base import BadRow
from hfdist.data.sources.formats import texts_in
from hfdist.data.sources.rows import RowReader
from hfdist.data.tokenization.encoders import Encoders
from hfdist.trainer.step.objective import Documents
from hfdist.tune.preference import are_pairs
from hfdist.tune.unpaired import mismatched
from tests.distributed.trl_runs import make_tokenizer

USER, ASSISTANT = {"role": "user", "content": "red cat"}, {"role": "assistant", "content": "sees dog"}
OTHER = {"role": "assistant", "content": "eats"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def read(row, kind=RowFormat.preference):
    return RowReader(format=kind).read(row, where="row 1")


def encode(tokenizer, row, kind=RowFormat.preference):
    [tokens] = Encoders(tokenizer, ChatConfig()).encode_examples([read(row, kind)])
    return tokens


def tensors(*pieces, length):
    """A sequence of pieces, filled up, as a batch of one row."""
    tokens = np.concatenate([*pieces, np.full(length - sum(map(len, pieces)), ~0, dtype=np.int32)])
    filling = [length - sum(map(len, pieces))] if sum(map(len, pieces)) < length else []
    lengths = [*map(len, pieces), *filling]
    rows = PackedSequence([tokens], lengths, [], Place(), length, 0, make_records(0)).rows
    return {
        name: torch.from_numpy(row)[None].long()
        for name, row in zip(("input_ids", "position_ids", "labels"), rows, strict=True)
    }


PAIR = {"prompt": "red cat ", "chosen": "sees dog", "rejected": "eats"}


def words(tokenizer, ids):
    return tokenizer.decode(ids).split()


def test_a_pair_is_two_documents_in_one_piece(tokenizer):
    batch = tensors(encode(tokenizer, PAIR), length=12)
    assert words(tokenizer, batch["input_ids"][0, :9]) == [
        "red",
        "cat",
        "sees",
        "dog",
        "<end>",
        "red",
        "cat",
        "eats",
        "<end>",
    ]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    labels, is_rejected = marks.split_labels(batch["labels"])
    ids = batch["input_ids"][0]
    expected = [IGNORED, IGNORED, *ids[2:5].tolist(), IGNORED, IGNORED, *ids[7:9].tolist(), *[IGNORED] * 3]
    assert labels[0].tolist() == expected
    assert is_rejected[0].tolist() == [False] * 7 + [True] * 2 + [False] * 3


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "red cat sees dog", "rejected": "red cat eats"},
        {"prompt": "red cat ", "chosen": "sees dog", "rejected": "eats"},
    ],
)
def test_what_both_answers_begin_with_is_their_prompt(tokenizer, row):
    assert (encode(tokenizer, row) == encode(tokenizer, PAIR)).all()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
        {"prompt": "red cat", "chosen": [ASSISTANT], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": json.dumps([ASSISTANT]), "rejected": json.dumps([OTHER])},
        {"prompt": "red cat", "chosen": "sees dog", "rejected": [OTHER]},
        {"prompt": "red cat", "chosen": json.dumps([ASSISTANT]), "rejected": [OTHER]},
        {"prompt": "red cat", "chosen": [ASSISTANT], "rejected": "eats"},
        # As of many sets on the Hub.
        {"prompt": "red cat", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]},
    ],
)
def test_conversations(tokenizer, row):
    batch = tensors(encode(tokenizer, row), length=16)
    said = words(tokenizer, batch["input_ids"][0])
    assert said[:10] == ["<user>", "red", "cat", "<assistant>", "sees", "dog", "<end>", "<user>", "red", "cat"]
    documents = Documents.of(batch)
    assert documents.num_chosen_targets[0] == 3
    assert documents.num_rejected_targets[1] == 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("red cat", ["red", "cat", "<end>"]),
        ([USER], ["<user>", "red", "cat", "<assistant>", "<end>"]),
        (json.dumps([USER]), ["<user>", "red", "cat", "<assistant>", "<end>"]),
    ],
)
def test_a_prompt_alone_asks_and_its_answer_is_the_end(tokenizer, prompt, said):
    tokens = encode(tokenizer, {"prompt": prompt}, RowFormat.prompt)
    assert words(tokenizer, marks.ids_of(tokens)) == said
    assert marks.are_targets(tokens).tolist() == [False] * (len(said) - 1) + [True]


@pytest.mark.parametrize("prompt", ["[1, 2]", '{"a": 1}', "[]"])
def test_a_prompt_that_is_json_of_something_else_is_text(prompt):
    row = RowReader(format=RowFormat.prompt).read({"prompt": prompt}, where="x")
    assert json.loads(row) == {"prompt": prompt, "completion": ""}


def test_an_answer_that_was_not_liked_is_rejected(tokenizer):
    row = {"prompt": "red cat ", "completion": "sees", "label": False}
    documents = Documents.of(tensors(encode(tokenizer, row, RowFormat.unpaired_preference), length=6))
    assert documents.num_rejected_targets.tolist()[:2] == [2, 0]
    assert documents.num_chosen_targets.sum() == 0
    liked = encode(tokenizer, row | {"label": True}, RowFormat.unpaired_preference)
    assert Documents.of(tensors(liked, length=6)).num_chosen_targets[0] == 2


def test_all_texts_are_there_for_what_wants_text():
    assert texts_in(read(PAIR)).split() == ["red", "cat", "sees", "dog", "eats"]
    assert texts_in(read({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]})).split()[-1] == "eats"


@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, RowFormat.preference, "columns are missing"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, RowFormat.preference, "neither a text nor a list"),
        ({"chosen": [ASSISTANT], "rejected": []}, RowFormat.preference, "the conversation is empty: rejected"),
        ({"prompt": "a", "completion": "b", "label": 2}, RowFormat.unpaired_preference, "true or false"),
        ({"prompt": 4}, RowFormat.prompt, "neither a text nor a list"),
    ],
)
def test_rows_of_another_form_are_bad(row, kind, said):
    bad = read(row, kind)
    assert isinstance(bad, BadRow)
    assert said in str(bad.error)


def test_pairs_are_counted_where_both_answers_are(tokenizer):
    pair, alone = encode(tokenizer, PAIR), marks.reject(encode(tokenizer, PAIR)[:5])
    batch = tensors(pair, alone, pair, length=26)
    assert are_pairs(Documents.of(batch)).nonzero()[:, 0].tolist() == [0, 3]


def test_prompts_with_the_answers_of_others_fill_the_same_sequence(tokenizer):
    rows = [
        {"prompt": f"{prompt} ", "completion": answer, "label": label}
        for prompt, answer, label in (("red", "sees dog", True), ("big cat", "eats", False), ("the", "a a a", True))
    ]
    pieces = [encode(tokenizer, row, RowFormat.unpaired_preference) for row in rows]
    batch = mismatched(tensors(*pieces, length=16))
    said = ["red", "a", "a", "a", "<end>", "big", "cat", "sees", "dog", "<end>", "the", "eats", "<end>"]
    assert words(tokenizer, batch["input_ids"][0, :13]) == said
    assert batch["position_ids"][0].tolist() == [*range(5), *range(5), *range(3), *range(3)]
    documents = Documents.of(batch)
    assert documents.num_chosen_targets[:4].tolist() == [4, 3, 2, 0]
    assert documents.num_rejected_targets.sum() == 0
    alone = mismatched(tensors(pieces[0], length=8))
    assert (alone["labels"] == IGNORED).all()
