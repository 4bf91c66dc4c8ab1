"""Rows with labels: their columns, their tokens and what comes back of them, and rows that are bad."""

import json

import pytest
import torch

from hfdist.config.composition.compose import compose_config
from hfdist.config.data import LABELLED, LabelsConfig, Packing, ProblemType, RowFormat
from hfdist.data.documents.corpus import open_corpus
from hfdist.data.documents.labels import find_labels
from hfdist.data.label_tokens import of_classes, of_number, of_tags, to_classes, to_tags
from hfdist.data.packing.sequence import IGNORED
from hfdist.data.sources.base import BadRow, ContentError
from hfdist.data.sources.formats import texts_in
from hfdist.data.sources.rows import RowReader
from hfdist.data.tokenization.encoders import Encoders
from hfdist.errors import ConfigError, DataError
from hfdist.tune.labelled_texts import IDS, LABELS, MASK, SEGMENTS, have_labels, take_apart
from tests.distributed.encoder_runs import make_tokenizer

SINGLE, MULTI, NUMBER = (
    ProblemType.single_label_classification,
    ProblemType.multi_label_classification,
    ProblemType.regression,
)
TASKS = {RowFormat.labelled: "classify", RowFormat.tagged: "token_classify", RowFormat.ranking: "rerank"}


def make_config(format, *overrides):
    return compose_config(
        ["model.name=x", f"task={TASKS[format]}", "data.sources.files.path=rows.jsonl", *overrides], name="tune"
    )


def encode(row, format, *, names=(), problem=SINGLE, overrides=()):
    config = make_config(format if format in TASKS else RowFormat.labelled, "data.sequence_length=12", *overrides).data
    config.labels = LabelsConfig(names=list(names), problem_type=problem)
    text = RowReader(format=format).read(row, where="row 1")
    if isinstance(text, BadRow):
        raise text.error
    [made] = Encoders.of(make_tokenizer(), config).encode_examples([text])
    if isinstance(made, ContentError):
        raise made
    return made


def batch_of(*rows):
    """What collating gives of one example a row."""
    ids = [torch.tensor([int(token) if token >= 0 else ~int(token) & (1 << 29) - 1 for token in row]) for row in rows]
    labels = []
    for row, own in zip(rows, ids, strict=True):
        is_second = torch.tensor([token < 0 and bool(~token & 1 << 29) for token in row])
        plain = torch.where(torch.tensor(row >= 0), own, IGNORED)
        labels.append(torch.where(is_second, IGNORED - 1 - own, plain))
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(ids, True, 0), "labels": pad(labels, True, IGNORED)}


@pytest.mark.parametrize(
    ("problem", "written", "wanted"),
    [
        (SINGLE, of_classes([2], SINGLE), 2),
        (MULTI, of_classes([2, 0, 2], MULTI), [1.0, 0.0, 1.0]),
        (MULTI, of_classes([], MULTI), [0.0, 0.0, 0.0]),
        (NUMBER, of_number(-0.1), torch.tensor(-0.1).item()),
        (NUMBER, of_number(3e38), torch.tensor(3e38).item()),
    ],
)
def test_labels_come_back(problem, written, wanted):
    assert all(0 <= token < 1 << 16 for token in written)
    padded = torch.tensor([[*written, -1]])
    assert to_classes(padded, problem, 3).tolist() == [wanted]


@pytest.mark.parametrize("problem", [SINGLE, MULTI, NUMBER])
def test_a_batch_may_have_no_label(problem):
    assert len(to_classes(torch.zeros(0, 1, dtype=torch.long), problem, 3)) == 0


def test_tags_come_back():
    assert to_tags(torch.tensor([*of_tags([None, 0, 3]), -1])).tolist() == [IGNORED, 0, 3, IGNORED]


def test_texts_and_pairs_are_those_of_the_tokenizer():
    tokenizer = make_tokenizer()
    pair = encode({"text": "red cat", "text_pair": "a dog", "label": "yes"}, RowFormat.labelled, names=["no", "yes"])
    alone = encode({"text": "now", "label": 0}, RowFormat.labelled, names=["no", "yes"])
    batch = take_apart(batch_of(pair, alone), tokenizer.pad_token_id)
    first = tokenizer("red cat", "a dog")
    assert batch[IDS][0, 0].tolist() == first["input_ids"]
    assert batch[SEGMENTS][0, 0].tolist() == first["token_type_ids"]
    second = tokenizer("now", padding="max_length", max_length=len(first["input_ids"]))
    assert batch[IDS][1, 0].tolist() == second["input_ids"]
    assert batch[MASK][1, 0].tolist() == second["attention_mask"]
    assert to_classes(batch[LABELS][:, 0], SINGLE, 2).tolist() == [1, 0]
    assert have_labels(batch).tolist() == [[True], [True]]


def test_a_pair_loses_of_its_longer_text():
    made = encode({"text": "red " * 20, "text_pair": "a dog", "label": 0}, RowFormat.labelled, names=["x", "y"])
    wanted = make_tokenizer()("red " * 20, "a dog", truncation=True, max_length=12)["input_ids"]
    assert take_apart(batch_of(made), 0)[IDS][0, 0].tolist() == wanted


def test_the_first_token_of_a_word_has_its_tag():
    row = {"tokens": ["red", "cat dog", "now"], "tags": ["B", "I", None]}
    made = encode(row, RowFormat.tagged, names=["B", "I"])
    batch = take_apart(batch_of(made), 0)
    assert to_tags(batch[LABELS])[0, 0].tolist() == [IGNORED, 0, 1, IGNORED, IGNORED, IGNORED]


def test_a_query_is_read_with_each_of_its_texts():
    row = {"query": "red cat", "positive": "a dog", "negatives": ["now", "the bird"]}
    prompts = ("data.texts.query_prompt='the '", "data.texts.max_tokens=7")
    batch = take_apart(batch_of(encode(row, RowFormat.ranking, overrides=prompts)), 0)
    tokenizer = make_tokenizer()
    for number, text in enumerate(("a dog", "now", "the bird")):
        wanted = tokenizer("the red cat", text, truncation=True, max_length=7)["input_ids"]
        assert batch[IDS][0, number][batch[MASK][0, number] == 1].tolist() == wanted
    assert batch[LABELS][0, :, 0].tolist() == [1, 0, 0]


def test_rows_without_a_label_have_one_token_and_no_item():
    whole = encode({"text": "red cat", "label": 1}, RowFormat.labelled, names=["x", "y"])
    batch = batch_of(whole, whole)
    batch["labels"][1] = IGNORED
    apart = take_apart(batch, 0)
    assert have_labels(apart).tolist() == [[True], [False]]
    assert apart[MASK].sum((1, 2)).tolist() == [4, 1]
    batch["labels"][:] = IGNORED
    assert not have_labels(take_apart(batch, 0)).any()
    # Filled up by a pipeline: a copy of a row, without its labels.
    apart["labels"] = torch.full_like(apart["labels"], IGNORED)
    assert not have_labels(apart).any()


@pytest.mark.parametrize(
    ("row", "format", "said"),
    [
        ({"text": " ", "label": "x"}, RowFormat.labelled, "the text is empty: text"),
        ({"text": "red", "label": "z"}, RowFormat.labelled, "the model has no such label"),
        ({"text": "red", "label": 2}, RowFormat.labelled, "the model has no such label"),
        ({"text": "red", "label": -1}, RowFormat.labelled, "the model has no such label"),
        ({"text": "red", "label": ["x"]}, RowFormat.labelled, "a row has one label"),
        ({"text": "red", "label": {}}, RowFormat.labelled, "this is no label: label"),
        ({"text": "red", "label": "x" * 1001}, RowFormat.labelled, "this is no label: label"),
        ({"text": "red", "label": float("nan")}, RowFormat.labelled, "this is no label: label"),
        ({"text": "red", "label": 1e39}, RowFormat.labelled, "this is no label: label"),
        ({"text": "red", "label": [10**400]}, RowFormat.labelled, r"this is no label: label\[0\]"),
        ({"tokens": ["red"], "tags": ["x", "y"]}, RowFormat.tagged, "each word has one tag: tags"),
        ({"tokens": [], "tags": []}, RowFormat.tagged, "the text is empty: tokens"),
        ({"tokens": ["red"], "tags": ["z"]}, RowFormat.tagged, "the model has no such label"),
        ({"text_a": "red", "text_b": "cat", "score": "1"}, RowFormat.scored_pair, "this is no number: score"),
        ({"text_a": "red", "text_b": "cat", "score": 10**400}, RowFormat.scored_pair, "this is no number: score"),
    ],
)
def test_bad_rows_are_named(row, format, said):
    with pytest.raises(ContentError, match=said):
        encode(row, format, names=["x", "y"])


def test_words_of_a_row_are_found():
    text = RowReader(format=RowFormat.tagged).read({"tokens": ["red", "cat"], "tags": [1, -100]}, where="row 1")
    assert json.loads(text) == {"tokens": ["red", "cat"], "tags": [1, None]}
    assert texts_in(text).split() == ["red", "cat"]


@pytest.mark.parametrize(
    ("labels", "problem", "names"),
    [
        (["b", "a", "b"], SINGLE, ["a", "b"]),
        ([2, 0, 0], SINGLE, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ([True, False], SINGLE, ["LABEL_0", "LABEL_1"]),
        ([["b"], [], ["a", "b"]], MULTI, ["a", "b"]),
        ([0.5, 1, 2.0], NUMBER, []),
    ],
)
def test_labels_are_found_in_the_rows(tmp_path, labels, problem, names):
    found = _find(tmp_path, labels)
    assert (found.problem_type, found.names) == (problem, names)
    # Read once: it is cached.
    assert _find(tmp_path, labels) == found


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", ["b"]], "some rows have a list of labels"),
        (["a", 1], "some labels are names, and others are numbers"),
        (["a", "a"], "there is nothing to tell apart"),
    ],
)
def test_labels_that_do_not_go_together_are_refused(tmp_path, labels, said):
    with pytest.raises(DataError, match=said):
        _find(tmp_path, labels)


def test_the_label_of_a_row_that_is_taken_out_does_not_count(tmp_path):
    assert _find(tmp_path, [0, "odd", 1], quarantine="[files:rows.jsonl:1]").names == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(
    ("labels", "known", "names"),
    [
        (["good", "bad"], ["good", "bad"], ["good", "bad"]),
        (["good", "bad"], ["good", "bad", "none"], ["bad", "good"]),
        ([0, 1], ["good", "bad"], ["good", "bad"]),
        ([0, 1, 2], ["good", "bad"], ["LABEL_0", "LABEL_1", "LABEL_2"]),
    ],
)
def test_a_model_that_has_these_labels_keeps_their_order(tmp_path, labels, known, names):
    assert _find(tmp_path, labels, known).names == names


def _find(folder, labels, known=(), quarantine="[]"):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"red {n}", "label": one}) + "\n" for n, one in enumerate(labels)))
    own = (f"data.sources.files.path={rows}", f"data.cache_dir={folder}/cache", "data.lanes=1")
    own += (f"data.quarantine={quarantine}",)
    config = make_config(RowFormat.labelled, *own).data
    return find_labels(open_corpus(config), config, known=known)


def test_a_row_is_a_sequence_and_has_room_for_its_labels():
    for format, factor in LABELLED.items():
        data = make_config(format, "data.sequence_length=100").data
        assert (data.packing, data.format, data.longest_row) == (Packing.none, format, 100 * factor)
    with pytest.raises(ConfigError, match=r"data\.labels\.names"):
        make_config(RowFormat.ranking, "data.labels.names=[a,b]")
