"""Rows with labels to tokens: the tokenizer itself joins a text or a pair for its model, and the labels follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from hfdist.config.data import DataConfig, ProblemType
from hfdist.data import label_tokens
from hfdist.data.marks import Tokens
from hfdist.data.sources.base import ContentError
from hfdist.errors import ConfigError
from hfdist.units import list_first

_SHOWN_LABELS = 20
_SEGMENTS = "token_type_ids"
"""Tokenizers' name for which text of a pair a token is of: 0 or 1."""


class LabelEncoder:
    """Encodes `labelled`, `tagged` and `ranking` rows; texts are cut to `data.texts.max_tokens`, and to a sequence.

    Args:
        tokenizer: Tokenizer of the run; for `tagged` rows a fast one.
        data: The config's section `data`, with the names and the kind of the labels.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._tokenizer, self._texts = tokenizer, data.texts
        self._most_tokens = min(data.sequence_length, data.texts.max_tokens or data.sequence_length)
        self._problem = data.labels.problem_type
        self._names = data.labels.names
        self._numbers = {name: number for number, name in enumerate(data.labels.names)}

    def label(self, example: Mapping[str, Any]) -> Tokens:
        """Give the tokens of a text or a pair, then those of its label; ContentError: the model has no such label."""
        label = example["label"]
        encoded = self._encode(example["text"], example.get("text_pair"))
        if self._problem is ProblemType.regression:
            if not isinstance(label, int | float):
                raise ContentError("this label is no number", found=repr(label), allowed="a number")
            return self._join(encoded, label_tokens.of_number(label))
        is_list = isinstance(label, list)
        if is_list != (self._problem is ProblemType.multi_label_classification):
            allowed = "one label" if is_list else "a list of labels"
            raise ContentError(
                f"a row has {allowed}, as data.labels.problem_type says", found=repr(label), allowed=allowed
            )
        numbers = [self._number(name) for name in (label if is_list else [label])]
        return self._join(encoded, label_tokens.of_classes(numbers, self._problem))

    def tag(self, example: Mapping[str, Any]) -> Tokens:
        """Give the tokens of words, then a tag for each token: that of the word at its first token, else none."""
        words, tags = example["tokens"], example["tags"]
        encoded = self._encode(words)
        numbers: list[int | None] = []
        word_before = None
        # None: a special token, which is of no word.
        for word in encoded.word_ids():
            is_tagged = word is not None and word != word_before and tags[word] is not None
            numbers.append(self._number(tags[word]) if is_tagged else None)
            word_before = word
        return self._join(encoded, label_tokens.of_tags(numbers))

    def rank(self, query: str, documents: Sequence[str]) -> Tokens:
        """Give the tokens of the query with each document, pair after pair, with the label 1 for the first, else 0."""
        texts = self._texts
        pairs: list[Tokens] = []
        for number, text in enumerate(documents):
            encoded = self._encode(texts.query_prompt + query, texts.document_prompt + text)
            pairs.append(self._join(encoded, [1 if number == 0 else 0]))
        return np.concatenate(pairs)

    def _encode(self, text: str | list[str], pair: str | None = None) -> BatchEncoding:
        """Let the tokenizer encode a text, a pair of texts, or a list of words."""
        if isinstance(text, list) and not self._tokenizer.is_fast:
            what = "the tokenizer cannot say which token is of which word: it is not a fast one"
            found = type(self._tokenizer).__name__
            raise ConfigError(what, where="model.tokenizer.name", found=found, allowed="a fast tokenizer")
        try:
            encoded: BatchEncoding = self._tokenizer(
                text,
                pair,
                is_split_into_words=isinstance(text, list),
                truncation=True,
                max_length=self._most_tokens,
                verbose=False,
                # A text that is a special token must not forge the end of another one.
                split_special_tokens=True,
            )
        except (AssertionError, ValueError) as error:
            what = f"the tokenizer does not take these texts: {error}"
            hint = "a tokenizer with add_prefix_space=true" if isinstance(text, list) else "another tokenizer"
            raise ConfigError(
                what, where="model.tokenizer.name", found=type(self._tokenizer).__name__, hint=hint
            ) from error
        return encoded

    def _join(self, encoded: BatchEncoding, labels: label_tokens.LabelTokens) -> Tokens:
        """Put the tokens of labels after those of a text."""
        ids, segments = encoded["input_ids"], encoded.get(_SEGMENTS)
        if not ids:
            raise ContentError("the tokenizer has no token for a text")
        if segments is not None and not set(segments) <= {0, 1}:
            what = "the tokenizer gives segments other than those of a pair"
            found = f"{sorted(set(segments))} of {type(self._tokenizer).__name__}"
            raise ConfigError(what, where="model.tokenizer.name", found=found, allowed="0 and 1")
        return label_tokens.with_labels(ids, segments, labels)

    def _number(self, label: str | float) -> int:
        """Give the number of a label, which may be its name; ContentError: the model has no such label."""
        number = self._numbers.get(label) if isinstance(label, str) else None
        if isinstance(label, int) and 0 <= label < len(self._names):
            number = label
        if number is None:
            raise ContentError(
                "the model has no such label",
                found=repr(label),
                allowed=f"{list_first(self._names, _SHOWN_LABELS)}; or 0 to {len(self._names) - 1}",
                hint="data.labels.names=[...] with all labels",
            )
        return number
