"""`data.*`: the sources, the order in which they are read, and how rows become sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hfdist.config.limits import limited


class SourceKind(Enum):
    """What a source is."""

    stdlib = "stdlib"
    files = "files"
    hub = "hub"


class Packing(Enum):
    """How documents become sequences of equal length."""

    concat = "concat"


@dataclass(kw_only=True)
class SourceConfig:
    """One named source of documents."""

    kind: SourceKind = SourceKind.files
    """`stdlib`: the installed Python standard library's own source, no download; `files`: local files by glob;
    `hub`: a dataset that `datasets.load_dataset` opens."""
    path: str | None = None
    """files: a file, folder or glob of .parquet, .jsonl(.gz|.zst) or .txt; hub: the dataset's id or folder."""
    text: str = "text"
    """The column that holds the text. Unused for .txt files, which are one document each."""
    subset: str | None = None
    """hub: the dataset's configuration name."""
    split: str = "train"
    revision: str | None = None


@dataclass(kw_only=True)
class DataConfig:
    """The token stream."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    sequence_length: int = limited(512, at_least=2)
    """Tokens in one sequence."""
    packing: Packing = Packing.concat
    seed: int = limited(0, at_least=0)
    """Of the order of the documents; independent of `train.seed`."""
    lanes: int = limited(48, at_least=1)
    """Independent reading positions. Fixes the order; the number of data ranks must divide it."""
    eval_fraction: float = limited(0.02, at_least=0, at_most=0.5)
    """Share of documents held out, chosen by a hash of their text, so that equal documents fall on one side."""
    eval_sequences: int = limited(128, at_least=1)
    """How many held-out sequences an evaluation uses at the most."""
    workers: int = limited(1, at_least=0)
    """Processes per rank that read, tokenize and pack ahead; 0: in the training process."""
    prefetch: int = limited(64, at_least=1)
    """Sequences that each worker holds ready."""
    cache_dir: str | None = None
    """For trained tokenizers, indexes and held-out tokens; null: $HFDIST_CACHE or ~/.cache/hfdist."""
