"""A run's folder opened for an audit: the data as the run opened them, its ledger, and what its checkpoints count."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.checkpoint import read_lanes, read_state
from hfdist.checkpoint.folder import STEP_NAME
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.config.data import cache_dir
from hfdist.config.run import RunConfig
from hfdist.data import Corpus, Cursor, open_corpus
from hfdist.data.order.records import Records, Status
from hfdist.data.order.shares import Shares
from hfdist.data.stream.ledger import read_records
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError, DataError
from hfdist.models.tokenizer import load_tokenizer
from hfdist.records import RunFolder
from hfdist.run.images import images_of_past_run
from hfdist.run.logs import set_up_logging
from hfdist.topology import Topology
from hfdist.verify.audit.exactly_once import first_sample


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """What a run has left, and what it read."""

    folder: Path
    config: RunConfig
    ledger: list[Records]
    """Records of all lanes."""
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    cursors: list[tuple[int, Cursor]]
    """Step and cursor of each checkpoint that is there, in order of the sequences that were read."""
    images: ImageTokens | None = None
    """What images of rows became; None: they had none."""


def open_past_run(folder: Path, config: RunConfig, others: Mapping[Path, RunConfig] | None = None) -> PastRun:
    """Open what is needed, in the order in which mistakes are cheapest to find.

    Args:
        folder: the run's folder.
        config: the run's config.
        others: folders and configs of the islands with which it has read one stream.

    Raises:
        ConfigError, DataError: the run has no ledger, or its data are not what they were.
        CheckpointError: a checkpoint is damaged.
    """
    set_up_logging(Topology())
    runs = {folder: config, **(others or {})}
    _check_indices(runs)
    cursors = [
        (int(match[1]), Cursor.from_json(read_state(path.parent).get("cursor"), read_lanes(path.parent)))
        for run in runs
        for path in sorted(RunFolder(run).checkpoints.glob(f"*/{MANIFEST}"))
        if (match := STEP_NAME.fullmatch(path.parent.name)) is not None
    ]
    cursors.sort(key=lambda pair: pair[1].samples)
    newest = cursors[-1][1] if cursors else None
    if newest is not None and newest.shares is not None:
        _check_islands(runs, newest.shares)
    ledgers = {own.islands.index: read_ledger(RunFolder(run).ledger, config.data.lanes) for run, own in runs.items()}
    ledger = next(iter(ledgers.values())) if len(ledgers) == 1 else join_ledgers(ledgers, newest)
    corpus = open_corpus(config.data)
    changes = [] if newest is None else corpus.inventory.changes_since(newest.contents, RunFolder(folder).ledger)
    if changes:
        hint = "an audit needs the data as the run read them"
        raise DataError("files have changed since the run", where="; ".join(changes), hint=hint)
    tokenizer = load_tokenizer(
        config.model, corpus_id=corpus.fingerprint, texts=corpus.training_texts, cache_dir=cache_dir(config.data)
    )
    return PastRun(
        folder=folder,
        config=config,
        ledger=ledger,
        corpus=corpus,
        tokenizer=tokenizer,
        images=images_of_past_run(config, tokenizer),
        cursors=cursors,
    )


def read_ledger(folder: Path, lanes: int) -> list[Records]:
    """Open the records of all lanes.

    Raises:
        DataError: there are none.
    """
    records = [np.asarray(read_records(folder, lane)) for lane in range(lanes)]
    if not any(map(len, records)):
        raise DataError(
            "the run has no ledger",
            where=str(folder),
            allowed="lane-*.records, which are written with each checkpoint and at the end",
            hint="an audit once the run has saved or ended",
        )
    return records


def _check_indices(runs: Mapping[Path, RunConfig]) -> None:
    """Refuse runs that are no islands of one stream."""
    seen: dict[int, Path] = {}
    for folder, config in runs.items():
        other = seen.setdefault(config.islands.index, folder)
        if other != folder:
            what, found = "these runs have not read one stream together", f"{other} and {folder} are one island"
            hint = f"hfdist audit {shlex.quote(f'run={other}')}, and each other run alone"
            raise ConfigError(what, where="run", found=found, allowed="the islands of one training", hint=hint)


def _check_islands(runs: Mapping[Path, RunConfig], shares: Shares) -> None:
    """Refuse to go on without an island that has read some of the data."""
    given = {own.islands.index for own in runs.values()}
    wanted = {index for ends in shares.ends.values() for index in ends}
    if wanted - given:
        raise ConfigError(
            "other islands have read a part of these data",
            where="run (command line)",
            found=f"the ledgers of {_list_islands(given)}",
            allowed=f"those of {_list_islands(wanted)}",
            hint=shlex.quote(f"run={','.join([*map(str, runs), *('FOLDER' for _ in wanted - given)])}"),
        )


def _list_islands(indices: set[int]) -> str:
    return f"island{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))}"


def join_ledgers(ledgers: Mapping[int, list[Records]], newest: Cursor | None) -> list[Records]:
    """Join the ledgers of islands: of each what counts. `newest` is the newest cursor of them all."""
    joined: list[list[Records]] = [[] for _ in next(iter(ledgers.values()))]
    for index, ledger in ledgers.items():
        for lane, records in enumerate(ledger):
            if newest is not None and newest.shares is not None:
                # What an island has read since its last exchange is not in the weights of the others.
                is_at = newest.lanes[lane].sequences if newest.shares.readers[lane] == index else 0
                records = records[records["sequence"] < max(newest.shares.end_of(lane, index), is_at)]
            joined[lane].append(records)
    of_lanes = map(np.concatenate, joined)
    return [records[np.argsort(records["sequence"], kind="stable")] for records in of_lanes]


def batches_of_steps(ledger: Sequence[Records], global_batch_size: int) -> tuple[int, NDArray[np.int64]]:
    """Find the global batch of each step: the next one with a target, since a batch without takes no step.

    Returns:
        First step of the ledger, and the batches from there on, both counted from 0; what a ledger that begins inside a
        run does not hold is taken to have been steps.
    """
    with_target = []
    for lane, records in enumerate(ledger):
        # The first token of each piece is no target.
        trained = records[(records["fate"] == Status.trained) & (records["num_tokens"] > 1)]
        with_target.append(np.unique((trained["sequence"] * len(ledger) + lane) // global_batch_size))
    return first_sample(ledger) // global_batch_size, np.unique(np.concatenate(with_target))
