"""Rows of sources and targets: from columns to tokens, and what is refused of them."""

import json

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import NllbTokenizer

from hfdist.config.data import ChatConfig, PairsConfig, RowFormat
from hfdist.data.sources.base import BadRow, ContentError
from hfdist.data.sources.rows import RowReader
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.pair_encoder import adopt_languages
from hfdist.errors import ConfigError
from tests.distributed.trl_runs import MARKS, WORDS, make_tokenizer

END = MARKS.index("<end>")
READER = RowReader(format=RowFormat.source_target)


def read(row):
    return READER.read(row, where="rows.jsonl, row 1")


@pytest.fixture
def tokenizer():
    own = make_tokenizer()
    own.backend_tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    return own


def encode(tokenizer, row, **settings):
    [tokens] = Encoders(tokenizer, ChatConfig(), pairs=PairsConfig(**settings)).encode_examples([read(row)])
    return tokens


def ids(text):
    return [len(MARKS) + WORDS.index(word) for word in text.split()]


ROW = {"source": "the red cat", "target": "a bird"}


def test_sources_are_context_and_targets_are_targets(tokenizer):
    tokens = encode(tokenizer, ROW)
    assert tokens.tolist() == [*(~np.array([*ids("the red cat"), END])).tolist(), *ids("a bird"), END]


def test_prompts_and_completions_are_sources_and_targets():
    assert json.loads(read({"prompt": "the red cat", "completion": "a bird"})) == ROW
    assert json.loads(read(ROW)) == ROW


def test_a_prompt_stands_before_sources_and_long_texts_lose_their_end(tokenizer):
    tokens = encode(tokenizer, ROW, source_prompt="now ", max_source_tokens=3, max_target_tokens=2)
    # The end token stays.
    assert (~tokens[:3]).tolist() == [*ids("now the"), END]
    assert tokens[3:].tolist() == [*ids("a"), END]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"source": "the cat", "target": "  "}, "text is empty: target"),
        ({"source": "", "target": "a bird"}, "text is empty: source"),
        ({"source": "the cat", "target": None}, "no value in `target`"),
        ({"source": ["the cat"], "target": "a"}, "no text: source"),
        ({"source": "the cat"}, "columns are missing"),
    ],
)
def test_rows_without_a_source_or_a_target_are_bad(row, words):
    found = read(row)
    assert isinstance(found, BadRow)
    assert words in str(found.error)


def test_a_text_without_tokens_is_bad():
    # Without an end token of its own, spaces of another kind are no word.
    [found] = Encoders(make_tokenizer(), ChatConfig()).encode_examples([json.dumps(ROW | {"target": "\u2003"})])
    assert isinstance(found, ContentError)
    assert "no token for the target" in str(found)


def test_digests_know_how_pairs_are_encoded(tokenizer):
    def digest(**settings):
        return Encoders(tokenizer, ChatConfig(), pairs=PairsConfig(**settings)).digest(examples=True)

    assert digest() == Encoders(tokenizer, ChatConfig()).digest(examples=True)
    assert len({digest(), digest(source_prompt="now "), digest(max_target_tokens=3)}) == 3


def test_languages_of_a_tokenizer_without_any_are_refused(tokenizer):
    adopt_languages(tokenizer, PairsConfig())
    with pytest.raises(ConfigError, match="no languages") as refused:
        adopt_languages(tokenizer, PairsConfig(target_language="de_DE"))
    assert refused.value.where == "data.pairs.target_language"


def test_languages_that_a_tokenizer_does_not_have_are_refused():
    nllb = NllbTokenizer()
    with pytest.raises(ConfigError, match="does not know"):
        adopt_languages(nllb, PairsConfig(target_language="de_DE"))
    adopt_languages(nllb, PairsConfig(target_language="deu_Latn"))
    assert nllb(text_target="a")["input_ids"][0] == nllb.convert_tokens_to_ids("deu_Latn")
