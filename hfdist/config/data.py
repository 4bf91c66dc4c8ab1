"""`data.*`: the sources, the order in which they are read, and how rows become sequences."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hfdist.config.paths import expand_user
from hfdist.config.ranges import LIMIT, Limit, limited


class SourceKind(Enum):
    """What a source is."""

    stdlib = "stdlib"
    docstrings = "docstrings"
    files = "files"
    hub = "hub"
    tokens = "tokens"


EXAMPLES = (SourceKind.stdlib.value, SourceKind.docstrings.value)
"""Sources that a recipe reads if no other is named."""


class Packing(Enum):
    """How documents become sequences.

    `concat`: end to end, cut at the length; `best_fit`: whole, together where they fill a sequence best, padded;
    `none`: one document a sequence, padded to the longest of its micro batch, lengths alike in a step; `auto`: what the
    task and the rows need.
    """

    auto = "auto"
    concat = "concat"
    best_fit = "best_fit"
    none = "none"


class RowFormat(Enum):
    """What a row holds, by its columns.

    `text`: documents, every token a target; `messages`: conversations as OpenAI writes them; `sharegpt`:
    `conversations` of `from` and `value`; `alpaca`: `instruction`, `input`, `output`; `prompt_completion`: `prompt` and
    `completion`, as text or as messages; `auto`: whichever of these a row's columns fit.

    Of `hfdist tune`: `preference`: `chosen` and `rejected`, with or without `prompt`; `unpaired_preference`: `prompt`,
    `completion` and `label` (true or false); `prompt`: a prompt alone; all as text or as messages. `retrieval`: `query`
    (or `anchor`), `positive` and, if there are any, negatives; `ranking`: the same columns, each text read together
    with its query. `scored_pair`: `text_a`, `text_b` and `score`. `labelled`: `text` and `label`, with or without
    `text_pair`. `tagged`: `tokens`, which are words, and `tags`, one a word. `source_target`: `source` and `target` (or
    `prompt` and `completion`), both text.
    """

    text = "text"
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    preference = "preference"
    unpaired_preference = "unpaired_preference"
    prompt_completion = "prompt_completion"
    prompt = "prompt"
    retrieval = "retrieval"
    ranking = "ranking"
    scored_pair = "scored_pair"
    labelled = "labelled"
    tagged = "tagged"
    source_target = "source_target"


NEGATIVES = ("negative", *(f"negative_{number}" for number in range(1, 17)), "negatives", "neg")
"""Columns of texts, or of lists of them, that do not belong to a query, in their order."""
_IMAGES = ("images", "image")
_COLUMNS_OF_AUTO = {
    RowFormat.text: ("text",),
    RowFormat.messages: ("messages", "tools", *_IMAGES),
    RowFormat.sharegpt: ("conversations", "system", "tools", *_IMAGES),
    RowFormat.alpaca: ("instruction", "output", "input", "system", "history", *_IMAGES),
    RowFormat.prompt_completion: ("prompt", "completion", "tools", *_IMAGES),
}
"""Columns of the formats that `auto` tells apart."""
COLUMNS = _COLUMNS_OF_AUTO | {
    RowFormat.auto: tuple(dict.fromkeys(name for names in _COLUMNS_OF_AUTO.values() for name in names)),
    RowFormat.preference: ("chosen", "rejected", "prompt", "tools", *_IMAGES),
    RowFormat.unpaired_preference: ("prompt", "completion", "label", "tools", *_IMAGES),
    RowFormat.prompt: ("prompt", "tools", *_IMAGES),
    RowFormat.retrieval: ("query", "anchor", "positive", "pos", *NEGATIVES),
    RowFormat.ranking: ("query", "anchor", "positive", "pos", *NEGATIVES),
    RowFormat.scored_pair: ("text_a", "text_b", "score"),
    RowFormat.labelled: ("text", "label", "text_pair"),
    RowFormat.tagged: ("tokens", "tags"),
    RowFormat.source_target: ("source", "target", "prompt", "completion"),
}
"""Columns that each format reads, if they are there."""
LABELLED = {RowFormat.labelled: 2, RowFormat.tagged: 2, RowFormat.ranking: 18}
"""Formats whose texts end with their labels, and how often `data.sequence_length`, which bounds a text, a row may have:
for a text and its labels, or for a query with each of the most texts that a row usually names."""


class ProblemType(Enum):
    """What a label is, as transformers calls it: one of several, some of several, or a number; `auto`: by the rows."""

    auto = "auto"
    single_label_classification = "single_label_classification"
    multi_label_classification = "multi_label_classification"
    regression = "regression"


class TrainOn(Enum):
    """Which tokens of a conversation are targets: those of the assistant, of its last turn, or all."""

    assistant = "assistant"
    last = "last"
    all = "all"


TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    }
)
"""Chat templates by name, for models that have none; ChatML is OpenAI's and Qwen's."""


class TooLong(Enum):
    """What to do with a document longer than a sequence: cut it in pieces, cut one end off, or leave it out."""

    split = "split"
    truncate_end = "truncate_end"
    truncate_start = "truncate_start"
    drop = "drop"


class BadRows(Enum):
    """What to do with a row or a file that cannot be read."""

    error = "error"
    skip = "skip"
    quarantine = "quarantine"


def are_columns(value: object) -> bool:
    """Whether a value names a column, or several."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name for name in names)


def read_shard(text: str) -> tuple[int, int]:
    """Read i/N; ValueError: it is none."""
    number, _, count = text.partition("/")
    if not (number.isascii() and number.isdigit() and count.isascii() and count.isdigit() and int(number) < int(count)):
        raise ValueError(text)
    return int(number), int(count)


def _is_shard(value: object) -> bool:
    try:
        return read_shard(str(value))[1] <= _MOST_SHARDS
    except ValueError:
        return False


WHOLE = "0/1"
_MOST_SHARDS = 100_000
SHARD = Limit("i/N, such as 0/4 to 3/4", _is_shard)
_COLUMN = Limit("a column, or a list such as [content,raw_text]", are_columns)


@dataclass(kw_only=True)
class SourceConfig:
    """One named source of documents."""

    kind: SourceKind = SourceKind.files
    """What the source is: stdlib | docstrings | files | hub | tokens.

    `stdlib`: the installed Python standard library's own source, no download; `docstrings`: what its functions do, as
    conversations; `files`: files by glob; `hub`: a dataset that `datasets` opens; `tokens`: what
    `recipes/pretokenize.py` wrote.
    """
    path: str | None = None
    """Place of the source. files: file, folder, glob or URL; hub: id or folder; tokens: folder.

    Files are .parquet, .arrow, .jsonl(.gz|.zst), .ndjson or .txt, here or at http(s)://, s3://, gs://, hf://.
    """
    text: Any = field(default="text", metadata={LIMIT: _COLUMN})
    """Column of the text (parquet, arrow, jsonl, hub); a list: each file has one of them.

    Unused for .txt files, which are one document each.
    """
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns as data.columns has them, for this source alone.

    By the name that a format has for a column: the column of the rows; `a.b` is b within a. Empty: as `data.columns`
    says.
    """
    format: RowFormat | None = None
    """What the source's rows hold; null: as data.format says."""
    index: str | None = None
    """files: folder of an index that hfdist index wrote; null: each start opens every file."""
    subset: str | None = None
    """hub: the dataset's configuration."""
    split: str = "train"
    """hub: the dataset's split."""
    revision: str | None = None
    """hub: branch, tag or commit."""
    weight: float | None = limited(None, above=0)
    """Share of the sequences beside the other weights; null for all: documents are mixed as they are."""
    epochs: int | None = limited(None, at_least=1)
    """Most passes over the source, after which the others go on without it; null: no limit."""


@dataclass(kw_only=True)
class WeightChange:
    """New weights from a step on."""

    step: int = limited(1, at_least=1)
    """How many steps are done before they hold."""
    weights: dict[str, float] = field(default_factory=dict)
    """New weight of every source, by name; 0 pauses one."""


@dataclass(kw_only=True)
class ChatConfig:
    """How conversations become tokens and targets."""

    template: str | None = None
    """File with a chat template in Jinja, or chatml; null: the tokenizer's own."""
    system: str | None = None
    """System prompt of conversations that have none."""
    train_on: TrainOn = TrainOn.assistant
    """Targets: assistant (all its turns) | last (its last one) | all (every token).

    Of a prompt with its completion: `all`, or only the completion.
    """
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as {enable_thinking: false}."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of tools for conversations whose rows have none; `task.environment` gives those of its tools."""


@dataclass(kw_only=True)
class LabelsConfig:
    """What the labels of `labelled` and `tagged` rows are."""

    names: list[str] = field(default_factory=list)
    """Names of the labels, in the order of the model's numbers; []: of the rows, in the model's order or sorted."""
    problem_type: ProblemType = ProblemType.auto
    """auto | single_label_classification | multi_label_classification (a row has a list) | regression (a number)."""


@dataclass(kw_only=True)
class TextsConfig:
    """How the texts of `retrieval`, `ranking`, `scored_pair`, `labelled` and `tagged` rows become tokens."""

    query_prompt: str = ""
    """retrieval, ranking: what is put before each query, such as "query: "."""
    document_prompt: str = ""
    """retrieval, ranking: what is put before each positive and negative, such as "passage: "."""
    max_tokens: int | None = limited(None, at_least=2)
    """Most tokens of a text, with its end token; longer ones lose their end. null: they are not cut.

    Of rows with labels, and of `ranking`: data.sequence_length, if it is less. Of a pair the longer one loses first.
    """


@dataclass(kw_only=True)
class PairsConfig:
    """How the texts of `source_target` rows become tokens."""

    source_prompt: str = ""
    """What is put before each source, such as "summarize: "."""
    source_language: str | None = None
    """Language of the sources, as the tokenizer names it (en_XX, eng_Latn); null: the tokenizer's own."""
    target_language: str | None = None
    """Language of the targets, as the tokenizer names it; null: the tokenizer's own."""
    max_source_tokens: int | None = limited(None, at_least=1)
    """Most tokens of a source, with its special ones; longer ones lose their end. null: they are not cut."""
    max_target_tokens: int | None = limited(None, at_least=1)
    """Most tokens of a target, with its special ones; longer ones lose their end. null: they are not cut."""


@dataclass(kw_only=True)
class ImagesConfig:
    """Images of rows, for models of image and text."""

    used: bool | None = None
    """Whether rows have images; null: whether one of the first rows has. Without, what reads images is frozen."""
    max_bytes: int = limited(32 * 2**20, at_least=1)
    """Bytes of an image above which its row is bad."""
    max_pixels: int = limited(64_000_000, at_least=1)
    """Pixels of an image above which its row is bad; nothing of it is decoded."""
    prefetch_bytes: int = limited(2**30, at_least=1)
    """Bytes of decoded images that each worker holds ready, besides those of one sequence."""


@dataclass(kw_only=True)
class DataConfig:
    """The token stream."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Sources by name; documents of all are mixed."""
    anneal: list[WeightChange] = field(default_factory=list)
    """Weights after so many batches: [{step: 900, weights: {web: 1, books: 4}}]; 0 pauses a source.

    Counted in global batches, which are the steps but for batches without a target: those take no step.
    """
    sequence_length: int = limited(512, at_least=2)
    """Tokens in a sequence."""
    packing: Packing = Packing.concat
    """How documents become sequences: concat (cut) | best_fit (whole) | none (one each) | auto (as needed)."""
    too_long: TooLong = TooLong.split
    """What becomes of documents longer than a sequence: split | truncate_end | truncate_start | drop.

    With `packing=none`, `split` keeps its beginning only.
    """
    format: RowFormat = RowFormat.text
    """What rows hold: see docs/fine-tuning.md and docs/tune.md; auto: told by their columns."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of other names: {prompt: question, completion: meta.answer}; a list: the first that is there."""
    keep_columns: bool | None = None
    """Whether rewards see the other columns of a row; null: where a task has rewards.

    They come as `Generation.columns`. What JSON does not have, such as images and times, is left out.
    """
    chat: ChatConfig = field(default_factory=ChatConfig)
    """How conversations become tokens and targets."""
    texts: TextsConfig = field(default_factory=TextsConfig)
    """How texts that are no documents become tokens."""
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    """What the labels of `labelled` and `tagged` rows are."""
    pairs: PairsConfig = field(default_factory=PairsConfig)
    """How the texts of `source_target` rows become tokens."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Images of rows, for models of image and text."""
    seed: int = limited(0, at_least=0)
    """Seed of the order of the documents."""
    lanes: int = limited(48, at_least=1)
    """Independent reading positions; the number of data ranks must divide it.

    They fix the order.
    """
    eval_fraction: float = limited(0.02, at_least=0, at_most=0.5)
    """Share of documents held out, by a hash of their text.

    Equal documents fall on one side.
    """
    eval_sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Held-out files instead (eval_fraction=0), as sources: {val: {path: val.jsonl}}.

    All of each source is held out.
    """
    eval_sequences: int = limited(128, at_least=1)
    """Most sequences of an evaluation; with eval_sources of each."""
    workers: int = limited(1, at_least=0)
    """Processes per rank that read and tokenize ahead; 0: none."""
    prefetch: int = limited(64, at_least=1)
    """Sequences that each worker holds ready."""
    on_bad_rows: BadRows = BadRows.error
    """Rows and files that cannot be read: error | skip | quarantine (skip, and write them down)."""
    quarantine: list[str] = field(default_factory=list)
    """Rows to take out, as SOURCE:FILE:ROW; everything else stays where it was."""
    shard: str = field(default=WHOLE, metadata={LIMIT: SHARD})
    """index, pretokenize: i/N, the share of the files that this process does, counted from 0.

    Whoever comes last of the N finishes the whole.
    """
    cache_dir: str | None = None
    """Folder of remote files, tokens, indexes and tokenizers; null: $HFDIST_CACHE or ~/.cache/hfdist."""
    file_cache_bytes: int = limited(100 * 2**30, at_least=2**20)
    """Bytes of remote files that a machine keeps."""
    token_cache_bytes: int = limited(100 * 2**30, at_least=0)
    """Bytes of tokens that a machine keeps for the next epoch and run; 0: none."""

    @property
    def longest_row(self) -> int:
        """Most tokens of a row: those of a sequence, unless its labels stand after its texts."""
        return self.sequence_length * LABELLED.get(self.format, 1)

    @property
    def longest_side(self) -> int:
        """Most tokens of a source, or of a target."""
        limits = (self.pairs.max_source_tokens, self.pairs.max_target_tokens)
        return max(self.sequence_length if most is None else min(most, self.sequence_length) for most in limits)

    @property
    def all_sources(self) -> dict[str, SourceConfig]:
        """All sources by their keys: those of the training, then the held-out ones."""
        sections = {"data.sources": self.sources, "data.eval_sources": self.eval_sources}
        return {f"{key}.{name}": source for key, sources in sections.items() for name, source in sources.items()}

    @property
    def formats(self) -> dict[str, RowFormat]:
        """The format of the rows of each source, and of those that say none, by the key that says it."""
        by_source = {f"{key}.format": source.format or self.format for key, source in self.all_sources.items()}
        return {"data.format": self.format, **by_source}


def cache_dir(config: DataConfig) -> Path:
    """Give the folder for what is computed once: `data.cache_dir`, $HFDIST_CACHE, or ~/.cache/hfdist."""
    named = config.cache_dir or os.environ.get("HFDIST_CACHE") or Path.home() / ".cache" / "hfdist"
    return expand_user(named)
