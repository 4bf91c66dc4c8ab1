"""The labels that the rows of a corpus have: what they are, and their names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from hfdist.config.data import DataConfig, LabelsConfig, ProblemType, RowFormat, cache_dir
from hfdist.data.cache import digest_of, write_once
from hfdist.data.documents.corpus import Corpus
from hfdist.data.sources.formats import split_columns
from hfdist.errors import ConfigError, DataError

_MOST_LABELS = 100_000
"""Labels that a model may have; a column of numbers or texts has more, and is no label."""


@dataclass
class _Seen:
    """Which labels have been seen."""

    names: set[str] = field(default_factory=set)
    largest: int = -1
    """The largest number of a label; -1: none was a number."""
    has_lists: bool = False
    has_single: bool = False
    has_fractions: bool = False

    def add(self, label: object) -> None:
        if isinstance(label, str):
            self.names.add(label)
        elif isinstance(label, int):
            self.largest = max(self.largest, label)
        elif isinstance(label, float):
            self.has_fractions = True


def find_labels(corpus: Corpus, config: DataConfig, *, known: Sequence[str] = ()) -> LabelsConfig:
    """Give what `data.labels` says, completed from the rows: all are read once, and what is found is cached.

    `known`: names in the model's config, in the order of its numbers. They stay where the rows have the same labels.

    Raises:
        ConfigError, DataError: rows of several kinds, names beside numbers, or more labels than a model may have.
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
    key = digest_of([2, corpus.local_fingerprint, sorted(corpus.quarantined)])
    path = cache_dir(config) / "labels" / f"{key}.json"
    write_once(path, lambda file: file.writelines([json.dumps(asdict(_look(corpus)), default=sorted).encode()]))
    values = json.loads(path.read_bytes())
    seen = _Seen(**values | {"names": set(values["names"])})
    problem = labels.problem_type if is_told else _problem(seen)
    if problem is ProblemType.regression:
        return replace(labels, problem_type=problem)
    return replace(labels, problem_type=problem, names=labels.names or _names(seen, known))


def _look(corpus: Corpus) -> _Seen:
    seen = _Seen()
    for label in _labels(corpus):
        seen.has_lists |= isinstance(label, list)
        seen.has_single |= not isinstance(label, list)
        for one in label if isinstance(label, list) else [label]:
            seen.add(one)
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
    """Give the labels of all rows that can be read and are not taken out; of words one after the other."""
    for block in corpus.mixed_blocks():
        for document, text in corpus.read(block):
            if isinstance(text, str) and document not in corpus.quarantined:
                example = json.loads(split_columns(text)[0])
                yield from example["tags"] if "tags" in example else [example.get("label")]


def _problem(seen: _Seen) -> ProblemType:
    if seen.has_lists and seen.has_single:
        what, hint = "some rows have a list of labels, and others have one", "a list in each row, or in none"
        raise DataError(what, where="data.labels.problem_type", found="both", hint=hint)
    if seen.has_lists:
        return ProblemType.multi_label_classification
    is_number = seen.has_fractions and not seen.names
    return ProblemType.regression if is_number else ProblemType.single_label_classification


def _names(seen: _Seen, known: Sequence[str]) -> list[str]:
    """Give the model's names, if the labels are these; else those seen, sorted, and of numbers transformers' names."""
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
    is_known = sorted(known) == names if seen.names else len(known) == len(names)
    return list(known) if is_known else names
