"""The labels of a corpus for classification or regression: their kind, and their names, found in all rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from hfdist.config.data import DataConfig, LabelsConfig, ProblemType, RowFormat, cache_dir
from hfdist.data.cache import digest_of, write_once
from hfdist.data.documents.corpus import Corpus
from hfdist.data.sources.formats import split_columns
from hfdist.errors import ConfigError, DataError

_FORMAT = 2
"""Version of what is cached of the labels of the same rows."""
_MOST_LABELS = 100_000
"""Labels that a model may have: a column with more holds numbers or texts, and no labels."""


@dataclass
class _Seen:
    """The labels that have been seen in the rows so far."""

    names: set[str] = field(default_factory=set)
    """Labels that are texts."""
    largest: int = -1
    """Largest label that is a whole number; -1: none is."""
    has_lists: bool = False
    """Whether some rows have a list of labels."""
    has_single: bool = False
    """Whether some rows have one label."""
    has_fractions: bool = False
    """Whether some labels are floating-point numbers."""

    def add(self, label: object) -> None:
        """Add a label; null is none."""
        if isinstance(label, str):
            self.names.add(label)
        elif isinstance(label, int):
            self.largest = max(self.largest, label)
        elif isinstance(label, float):
            self.has_fractions = True


def find_labels(corpus: Corpus, config: DataConfig, *, known: Sequence[str] = ()) -> LabelsConfig:
    """Complete `data.labels` with the labels of all rows, which are read once; the labels that are found are cached.

    `known` are the names in the model's config, in the order of their numbers. They are kept where the rows have the
    same labels.

    Raises:
        ConfigError: `data.labels` does not go with the format of the rows.
        DataError: The rows have labels of several kinds, or more labels than a model may have.
    """
    labels = config.labels
    if config.format is RowFormat.tagged:
        if labels.problem_type not in (ProblemType.auto, ProblemType.single_label_classification):
            what, hint = "a token has one label", "data.labels.problem_type=auto"
            raise ConfigError(what, where="data.labels.problem_type", found=labels.problem_type.value, hint=hint)
        labels = replace(labels, problem_type=ProblemType.single_label_classification)
    is_told = labels.problem_type is not ProblemType.auto
    if labels.problem_type is ProblemType.regression or (is_told and labels.names):
        return labels
    key = digest_of([_FORMAT, corpus.local_fingerprint, sorted(corpus.quarantined)])
    path = cache_dir(config) / "labels" / f"{key}.json"
    seen = _seen_in_cache(corpus, path)
    problem = labels.problem_type if is_told else _problem(seen)
    if problem is ProblemType.regression:
        return replace(labels, problem_type=problem)
    return replace(labels, problem_type=problem, names=labels.names or _names(seen, known))


def _seen_in_cache(corpus: Corpus, path: Path) -> _Seen:
    """Give the labels of a corpus from the file `path`; one process of this machine reads the rows and writes it."""

    def write(file: BinaryIO) -> None:
        # JSON has no sets.
        file.write(json.dumps(asdict(_look(corpus)), default=sorted).encode())

    write_once(path, write)
    values = json.loads(path.read_bytes())
    values["names"] = set(values["names"])
    return _Seen(**values)


def _look(corpus: Corpus) -> _Seen:
    """Read all rows for their labels; DataError: there are too many."""
    seen = _Seen()
    for label in _labels(corpus):
        if isinstance(label, list):
            seen.has_lists = True
            for item in label:
                seen.add(item)
        else:
            seen.has_single = True
            seen.add(label)
        if max(len(seen.names), seen.largest) > _MOST_LABELS:
            raise DataError(
                "the rows have more labels than a model may have",
                where="data.labels.names",
                found=f"more than {_MOST_LABELS:,}",
                allowed=f"<= {_MOST_LABELS:,}",
                hint="data.columns={label: COLUMN}",
            )
    return seen


def _labels(corpus: Corpus) -> Iterator[object]:
    """Give the label of each row that can be read and is not quarantined; of tagged words the tag of each word."""
    for block in corpus.mixed_blocks():
        for document, text in corpus.read(block):
            if isinstance(text, str) and document not in corpus.quarantined:
                example = json.loads(split_columns(text)[0])
                yield from example["tags"] if "tags" in example else [example.get("label")]


def _problem(seen: _Seen) -> ProblemType:
    """Tell by the labels what is learned; DataError: some rows have lists, and others do not."""
    if seen.has_lists and seen.has_single:
        what, hint = "some rows have a list of labels, and others have one", "a list in each row, or in none"
        raise DataError(what, where="data.labels.problem_type", found="both", hint=hint)
    if seen.has_lists:
        return ProblemType.multi_label_classification
    is_number = seen.has_fractions and not seen.names
    return ProblemType.regression if is_number else ProblemType.single_label_classification


def _names(seen: _Seen, known: Sequence[str]) -> list[str]:
    """Give the names of all labels in the order of their numbers.

    The model's names are kept if the labels are these. Else names are sorted, and numbers get the names that
    transformers gives them. DataError: names stand beside numbers, or there is a single label.
    """
    if seen.names and seen.largest >= 0:
        hint = "data.labels.names=[...], in the order of the numbers"
        found = f"{sorted(seen.names)[0]!r} and {seen.largest}"
        raise DataError(
            "some labels are names, and others are numbers", where="data.labels.names", found=found, hint=hint
        )
    names = sorted(seen.names) or [f"LABEL_{number}" for number in range(seen.largest + 1)]
    if len(names) < 2 and not seen.has_lists:
        what, hint = "there is nothing to tell apart: all rows have the same label", "data.labels.names=[...] with all"
        raise DataError(what, where="data.labels.names", found=", ".join(names) or "no label", hint=hint)
    # Numbers are the model's labels if there are as many.
    is_known = len(known) == len(names)
    if seen.names:
        is_known = sorted(known) == names
    return list(known) if is_known else names
