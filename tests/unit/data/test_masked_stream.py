"""Examples through the stream: cut or left out, packed, cached, held out, resumed, with the same targets throughout."""

import json
import re
from itertools import takewhile

import datasets
import numpy as np
import pytest
import torch

from hfdist.config.data import BadRows, ChatConfig, DataConfig, Packing, RowFormat, SourceConfig, SourceKind, TooLong
from hfdist.config.task import TaskConfig
from hfdist.data import TokenStream, build_held_out, describe_losses, open_corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.records import Status
from hfdist.data.packing.sequence import INPUT_IDS, LABELS
from hfdist.data.pretokenize import pretokenize
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import text_digest
from hfdist.errors import CheckpointError, ConfigError, DataError
from hfdist.models.tokenizer import train_bpe
from hfdist.run.preview import preview
from hfdist.run.survey import survey
from tests.unit.data.chat_styles import chat_tokenizer
from tests.unit.data.document_batches import one_by_one

LENGTH = 48
WORDS = ["Hello", "Hi", "Bye", "thanks", "name", "It", "is", "3.", "tool"]


def conversation(number):
    """Of uneven length, told apart by its first message."""
    words = [WORDS[(number * 7 + k * 3) % len(WORDS)] for k in range(1 + number % 5)]
    turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": " ".join(words)}]
    return turns * (1 + number % 2)


def tokenizer():
    return chat_tokenizer("chatml")


def corpus_of(config, rows=None):
    rows = [{"messages": conversation(n)} for n in range(60)] if rows is None else rows
    return open_corpus(config, {"x": datasets.Dataset.from_list(rows)})


def config_of(cache_dir, *, epochs=1, **settings):
    defaults = {"sequence_length": LENGTH, "lanes": 4, "eval_fraction": 0.0, "workers": 0, "format": RowFormat.auto}
    defaults |= {"packing": Packing.best_fit, "too_long": TooLong.truncate_end}
    sources = {"x": SourceConfig(path="memory", epochs=epochs)}
    return DataConfig(sources=sources, cache_dir=str(cache_dir), **{**defaults, **settings})


def stream_of(config, rows=None, **more):
    return TokenStream(corpus_of(config, rows), tokenizer(), config, **more)


def documents_of(config, rows=None):
    documents = Documents(corpus_of(config, rows), Encoders(tokenizer(), config.chat), open_token_cache(config), config)
    blocks = map(np.array, documents.corpus.mixed_blocks())
    return [one for block in blocks for chunk in documents.chunks(block) for one in one_by_one(chunk)]


def encoded(messages):
    return Encoders(tokenizer(), ChatConfig()).encode_examples([json.dumps({"messages": messages})])[0]


def targets_in(stream):
    """All targets with the token before each, over all sequences; each of them once."""
    found = []
    for item in stream:
        ids, labels = item["input_ids"], item["labels"]
        found += [(int(ids[n - 1]), int(labels[n])) for n in torch.nonzero(labels >= 0).flatten().tolist()]
        assert (labels[labels >= 0] == ids[labels >= 0]).all()
        assert (labels >= 0).any()
    return sorted(found)


def targets_of(tokens):
    ids = np.where(tokens < 0, ~tokens, tokens)
    return [(int(ids[n - 1]), int(ids[n])) for n in range(1, len(tokens)) if tokens[n] >= 0]


@pytest.mark.parametrize("packing", [Packing.best_fit, Packing.none])
def test_each_target_once_in_each_packing(packing, tmp_path):
    expected = sorted(pair for n in range(60) for pair in targets_of(encoded(conversation(n))[:LENGTH]))
    assert targets_in(stream_of(config_of(tmp_path, packing=packing))) == expected


def test_end_to_end_only_what_a_cut_leaves_without_a_context_is_no_target(tmp_path):
    config = config_of(tmp_path, packing=Packing.concat, too_long=TooLong.split)
    whole = [pair for n in range(60) for pair in targets_of(encoded(conversation(n)))]
    stream = stream_of(config)
    found = [int(label) for item in stream for label in item["labels"] if label >= 0]
    assert 0 <= len(whole) - len(found) <= stream.state_dict()["samples"]
    assert stream.may_lack_targets


class TestTooLong:
    LONG = (conversation(0)[0], {"role": "assistant", "content": "Hello " * 100}, *conversation(1))
    LATE = ({"role": "user", "content": "Hi " * 100}, {"role": "assistant", "content": "Bye"})

    @pytest.fixture
    def rows(self):
        unanswered = [{"role": "user", "content": "no answer"}]
        return [{"messages": one} for one in (conversation(1), conversation(1), self.LONG, self.LATE, unanswered)]

    @pytest.mark.parametrize(
        ("too_long", "fates"),
        [
            (TooLong.split, ["no_target", "trained", "trained", "trained", "trained"]),
            (TooLong.truncate_end, ["no_target", "no_target", "trained", "trained", "trained"]),
            (TooLong.truncate_start, ["no_target", "trained", "trained", "trained", "trained"]),
            (TooLong.drop, ["no_target", "too_long", "too_long", "trained", "trained"]),
        ],
    )
    def test_what_becomes_of_examples(self, rows, too_long, fates, tmp_path):
        found = documents_of(config_of(tmp_path, too_long=too_long, lanes=1), rows)
        assert sorted(one.fate.name for one in found) == fates
        tokens = {one.number: one.tokens for one in found}
        long = encoded(self.LONG)
        expected = {TooLong.split: long, TooLong.truncate_end: long[:LENGTH], TooLong.truncate_start: long[-LENGTH:]}
        assert tokens[2].tolist() == expected.get(too_long, long[:0]).tolist()

    def test_the_ledger_and_the_survey_count_them(self, rows, tmp_path):
        config = config_of(tmp_path, lanes=1)
        stream = stream_of(config, rows)
        given = takewhile(lambda one: one[1] is not None, stream.packed(0, 1))
        records = np.concatenate([packed.records for _, _, packed in given])
        read = [len(encoded(messages)) for messages in (conversation(1), conversation(1), self.LONG)]
        assert sorted(records["of_tokens"][records["fate"] == Status.trained]) == sorted(read)
        losses = f"1 cut to {LENGTH} tokens, 2 left out without a target"
        assert describe_losses([records], config) == losses
        assert describe_losses([records[records["document"] == 0]], config) is None
        told = survey(stream.corpus, tokenizer(), config, TaskConfig())
        assert told.startswith("5 examples: ")
        assert told.endswith(f"; 1 cut to {LENGTH} tokens; 2 left out without a target")


def test_tokens_come_back_from_the_cache_as_they_were(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    made = documents_of(config)
    monkeypatch.setattr(Encoders, "encode_examples", lambda *_: pytest.fail("tokenized again"))
    kept = documents_of(config)
    assert [one.tokens.tolist() for one in made] == [one.tokens.tolist() for one in kept]
    assert all((one.tokens < 0).any() and (one.tokens >= 0).any() for one in kept)


@pytest.mark.parametrize(
    "other",
    [{"chat": ChatConfig(system="s")}, {"chat": ChatConfig(template_arguments={"x": 1})}, {"too_long": TooLong.drop}],
    ids=["system", "arguments", "too long"],
)
def test_settings_that_change_the_targets_change_the_identity(other, tmp_path):
    before, after = (stream_of(config_of(tmp_path, **more)).state_dict()["identity"] for more in ({}, other))
    assert before != after


def test_a_cursor_of_another_rule_of_packing_is_refused(tmp_path, monkeypatch):
    whole, ends = config_of(tmp_path), config_of(tmp_path, packing=Packing.concat)
    states = [stream_of(config).state_dict() for config in (whole, ends)]
    monkeypatch.setattr("hfdist.data.stream.lane_plan.RULE", 1)
    with pytest.raises(CheckpointError, match="rules of packing have changed"):
        stream_of(whole).load_state_dict(states[0])
    # Nothing of it is in sequences that are cut end to end.
    stream_of(ends).load_state_dict(states[1])


def test_a_template_that_changes_is_not_read_from_the_cache(tmp_path):
    path = tmp_path / "chat.jinja"
    config = config_of(tmp_path, chat=ChatConfig(template=str(path)))
    texts = []
    for before in "[(":
        path.write_text(f"{{% for m in messages %}}{before}{{{{ m.content }}}}{{% endfor %}}")
        tokens = documents_of(config)[0].tokens
        texts.append(tokenizer().decode(np.where(tokens < 0, ~tokens, tokens)[:1]))
    assert texts == ["[", "("]


def test_equal_examples_fall_on_one_side_of_the_split(tmp_path):
    config = config_of(tmp_path, eval_fraction=0.3, eval_sequences=100)
    rows = [{"messages": conversation(n % 30)} for n in range(60)]
    found = documents_of(config, rows)
    held_out = {one.number % 30 for one in found if one.fate is Status.held_out}
    assert 3 <= len(held_out) <= 20
    assert {one.number % 30 for one in found if one.fate is Status.trained} == set(range(30)) - held_out
    corpus = corpus_of(config, rows)
    assert held_out == {n for n in range(30) if corpus.is_held_out(text_digest(corpus.text(n)))}
    # Whole examples, with the targets that they have in training.
    sequences = build_held_out(corpus, tokenizer(), config)
    found = [int(label) for item in sequences for label in item["labels"] if label >= 0]
    expected = [target for n in sorted(held_out) for _, target in targets_of(encoded(conversation(n))[:LENGTH])] * 2
    assert sorted(found) == sorted(expected)


def test_few_examples_are_enough_for_a_held_out_set(tmp_path):
    config = config_of(tmp_path, eval_fraction=0.1, sequence_length=2048)
    sequences = build_held_out(corpus_of(config), tokenizer(), config)
    assert len(sequences) == 1
    assert (sequences[0]["labels"] >= 0).sum() < 2048


@pytest.mark.parametrize(
    ("settings", "what", "found", "hint"),
    [
        ({"eval_fraction": 0.2, "sequence_length": 3}, "nothing to learn", "without a target", "truncate_start"),
        ({"eval_fraction": 0.2, "sequence_length": 3, "too_long": TooLong.drop}, "nothing to learn", "too long",
         "a larger data.sequence_length"),
        ({"eval_fraction": 0.05, "format": RowFormat.text, "sequence_length": 9999}, "do not fill one sequence",
         "tokens", "a smaller data.sequence_length"),
        ({"eval_fraction": 0.05, "format": RowFormat.text, "sequence_length": 100}, "do not fill one sequence",
         "tokens", "data.eval_fraction=0."),
    ],
)  # fmt: skip
def test_an_empty_held_out_set_says_what_was_found(tmp_path, settings, what, found, hint):
    rows = None
    if settings.get("format") is RowFormat.text:
        rows = [{"text": f"{number} Hello Hi Bye thanks"} for number in range(60)]
        settings = settings | {"packing": Packing.concat, "too_long": TooLong.split}
    config = config_of(tmp_path, **settings)
    with pytest.raises(DataError) as caught:
        build_held_out(corpus_of(config, rows), tokenizer(), config)
    assert what in caught.value.what
    assert found in caught.value.found
    assert hint in caught.value.hint
    if share := re.match(r"data\.eval_fraction=([0-9.]+),", caught.value.hint):
        # It works when it is followed.
        config = config_of(tmp_path, **settings | {"eval_fraction": float(share[1])})
        assert build_held_out(corpus_of(config, rows), tokenizer(), config)


def test_a_share_of_few_documents_holds_one(tmp_path):
    """Of one document nothing is held out: it is trained on."""
    config = config_of(tmp_path, eval_fraction=1e-9)
    corpus = corpus_of(config)
    texts = [corpus.text(number) for number in range(60)]
    held_out = [text for text in texts if corpus.is_held_out(text_digest(text))]
    assert held_out == [min(texts, key=text_digest)]
    assert len(build_held_out(corpus, tokenizer(), config)) == 1
    config = config_of(tmp_path, eval_fraction=1e-9, lanes=1)
    alone = corpus_of(config, [{"messages": conversation(1)}])
    with pytest.raises(DataError, match="no document was drawn"):
        build_held_out(alone, tokenizer(), config)


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([conversation(1)] * 30, {}, ["no document was drawn", "30 documents, which are all alike"]),
        ([[]] * 30, {}, ["no document was drawn", "30 were left out as bad", "data.on_bad_rows=error"]),
        ([[{"role": "user", "content": f"a {n}"}] for n in range(30)], {},
         ["nothing to learn", "without a target", "turns of the roles user (30)", "`assistant`"]),
        ([conversation(n) for n in range(30)], {"sequence_length": 3}, ["nothing to learn", "assistant (",
                                                                        "data.too_long=truncate_start"]),
    ],
)  # fmt: skip
def test_an_empty_held_out_set_says_which_rows_were_found(tmp_path, rows, settings, words):
    config = config_of(tmp_path, eval_fraction=0.02, on_bad_rows=BadRows.skip, **settings)
    with pytest.raises(DataError) as caught:
        build_held_out(corpus_of(config, [{"messages": messages} for messages in rows]), tokenizer(), config)
    said = str(caught.value)
    assert [word for word in words if word not in said] == []
    assert "0 empty" not in said


@pytest.mark.parametrize(
    ("texts", "what"),
    [(["", *["the same text"] * 30], "no document was drawn"), ([" "] * 30, "the documents are empty")],
)
def test_documents_are_empty_only_if_all_of_them_are(tmp_path, texts, what):
    config = config_of(
        tmp_path, format=RowFormat.text, packing=Packing.concat, too_long=TooLong.split, eval_fraction=0.01
    )
    with pytest.raises(DataError, match=what):
        build_held_out(corpus_of(config, [{"text": text} for text in texts]), tokenizer(), config)


def test_a_bad_conversation_stops_the_run_or_is_left_out(tmp_path):
    rows = [{"messages": conversation(1)}, {"messages": [{"role": "user", "content": "\U00100000"}]}]
    with pytest.raises(DataError, match="private characters") as caught:
        documents_of(config_of(tmp_path, lanes=1), rows)
    assert caught.value.where == "x, row 1"
    assert "data.on_bad_rows=skip, or 'data.quarantine=[x:x:1]'" in caught.value.hint
    found = documents_of(config_of(tmp_path, lanes=1, on_bad_rows=BadRows.skip), rows)
    assert {one.number: one.fate for one in found} == {0: Status.trained, 1: Status.bad}


def test_a_tokenizer_without_a_template_stops_before_training(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.chat\.template"):
        Encoders(train_bpe(["a b"], 300), config.chat).check(shard for _, shard in corpus_of(config).shards)
    with pytest.raises(ConfigError, match=r"data\.chat\.template"):
        survey(corpus_of(config), train_bpe(["a b"], 300), config, TaskConfig())


def test_a_source_without_rows_has_no_example_to_try(tmp_path):
    config = config_of(tmp_path, lanes=1, epochs=None)
    rows = datasets.Dataset.from_list([{"messages": conversation(n)} for n in range(4)])
    corpus = open_corpus(config, {"x": rows, "y": rows.select([])})
    Encoders(tokenizer(), config.chat).check(shard for _, shard in corpus.shards)


def test_text_and_conversations_go_together(tmp_path):
    rows = [{"messages": conversation(1), "text": None}, {"messages": None, "text": "Hello Hello"}]
    tokens = {one.number: one.tokens for one in documents_of(config_of(tmp_path, lanes=1), rows)}
    assert (tokens[0] < 0).any()
    assert (tokens[1] >= 0).all()
    assert tokens[1][-1] == tokenizer().eos_token_id


def test_pretokenized_examples_train_as_the_conversations(tmp_path):
    config = config_of(tmp_path)
    corpus = corpus_of(config)
    folder = tmp_path / "tokens"
    how = {"workers": 0, "on_bad_rows": BadRows.error}
    pretokenize(corpus.shards, tokenizer(), folder, **how, chat=config.chat)
    tokens = config_of(tmp_path)
    tokens.sources = {"x": SourceConfig(kind=SourceKind.tokens, path=str(folder), epochs=1)}
    made = TokenStream(open_corpus(tokens), tokenizer(), tokens)
    assert made.corpus.has_examples
    for ours, theirs in zip(made, stream_of(config), strict=True):
        for name in theirs:
            assert torch.equal(ours[name], theirs[name])
    # Other settings of the chat make other tokens.
    with pytest.raises(ConfigError, match=r"data\.chat"):
        pretokenize(corpus.shards, tokenizer(), folder, **how, chat=ChatConfig(system="s"))


class TestPreview:
    def test_it_shows_what_the_stream_gives(self, tmp_path):
        stream = stream_of(config_of(tmp_path))
        before = json.dumps(stream.state_dict())
        shown = list(preview(stream, tokenizer(), 2, TaskConfig()))
        assert json.dumps(stream.state_dict()) == before
        for text, (_, _, sequence) in zip(shown, stream.packed(0, 1), strict=False):
            labels = sequence.rows[LABELS]
            head, _, body = text.partition("\n")
            assert f"{sequence.num_tokens} tokens, {(labels >= 0).sum()} of them targets" in head
            # The text within brackets is that of the labels, the rest that of the other tokens.
            marked = "".join(part.partition("\u27e7")[0] for part in body.split("\u27e6")[1:])
            assert marked.replace("\n  ", "\n") == tokenizer().decode(labels[labels >= 0])
            ids = sequence.rows[INPUT_IDS][: sequence.num_tokens]
            plain = body.replace("\u27e6", "").replace("\u27e7", "").replace("\n  --\n", "")
            assert "".join(plain.split()) == "".join(tokenizer().decode(ids).split())

    def test_without_control_characters_and_without_the_middle_of_what_is_long(self, tmp_path):
        asked = {"role": "user", "content": "\x1b[31m" + "Hi " * 900}
        rows = [{"messages": [asked, {"role": "assistant", "content": "a"}]}]
        stream = stream_of(config_of(tmp_path, lanes=1, sequence_length=2048), rows)
        (text,) = preview(stream, tokenizer(), 1, TaskConfig())
        assert "\u27e6a<|im_end|>\u27e7" in text
        assert "\x1b[31m" not in text
        assert "\\x1b[31mHi" in text
        assert "characters]" in text
        assert len(text) < 1200
