"""A run's folder opened for an audit: the data as the run opened them, its ledger, and what its checkpoints count."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
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
from hfdist.data import Corpus, Cursor, TokenStream, open_corpus
from hfdist.data.documents.bad_rows import quarantine
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.marks import ids_of
from hfdist.data.order.records import Records, Status
from hfdist.data.order.shares import Shares
from hfdist.data.stream.ledger import read_records
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.image_tokens import ImageTokens
from hfdist.errors import ConfigError, DataError, printable
from hfdist.host_cores import usable_cores
from hfdist.models.tokenizer import load_tokenizer
from hfdist.records import RunFolder
from hfdist.run.images import images_of_past_run
from hfdist.run.logs import set_up_logging
from hfdist.secrets import mask_secrets
from hfdist.topology import Topology
from hfdist.verify.audit.exactly_once import Audit, first_sample
from hfdist.verify.audit.lane_audit import are_readable

_SHOWN_CHARACTERS = 80
_MANY_RECORDS = 2**20
"""From here on, other processes save more time than their start takes."""


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
        folder: of a run.
        config: of it.
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


def prove_once(run: PastRun, *, processes: int | None = None) -> Iterator[str]:
    """Compare the ledger with the plan; gives lines for a terminal, the verdict last.

    Args:
        run: to be proved.
        processes: among which its lanes are dealt; None: as many as cores, 1 for a small ledger.

    Raises:
        ResourceError: one of the processes has died.
        DataError: not every document was read as planned, once all of it is told; or the data have changed.
    """
    shares = run.config.islands.shares
    batch = shares * run.config.train.global_batch_size
    stream = TokenStream(run.corpus, run.tokenizer, run.config.data, global_batch_size=batch).read_images(run.images)
    if processes is None:
        processes = usable_cores() if sum(map(len, run.ledger)) >= _MANY_RECORDS else 1
    audit = Audit(
        run.ledger,
        run.corpus,
        stream.plan,
        run.cursors,
        identity=stream.identity,
        global_batch_size=batch,
        takes_turns=shares == 1,
    ).check(processes)
    yield from _summarize(run, audit)
    if audit.passed:
        yield "AUDIT: passed: every document was seen exactly as often as planned"
        return
    yield str(audit.discrepancies)
    yield "AUDIT: failed"
    found = "; ".join(f"{kind.value}: {count:,}" for kind, count in audit.discrepancies.counts.items())
    raise DataError("the ledger is not what the run was to read", where=str(RunFolder(run.folder).ledger), found=found)


def _summarize(run: PastRun, audit: Audit) -> Iterator[str]:
    batch, islands = run.config.train.global_batch_size, run.config.islands.shares
    first_step, batches = batches_of_steps(run.ledger, islands * batch)
    num_steps = int(np.searchsorted(batches, -(-(audit.first_sample + audit.num_sequences) // batch)))
    steps = f"steps {first_step + 1} to {first_step + num_steps}" if islands == 1 else f"{islands} islands"
    lanes = f"{audit.num_sequences:,} sequences of {run.config.data.lanes} lanes"
    yield f"{run.folder}: {steps}, {lanes}, {audit.totals.tokens:,} tokens"
    if first_step:
        yield f"the run began from another run's checkpoint of step {first_step}; what came before is in its ledger"
    if run.cursors:
        yield f"checkpoints compared: steps {', '.join(map(str, sorted({step for step, _ in run.cursors})))}"
    else:
        yield "there is no checkpoint to compare with: the last documents of each lane may be missing unnoticed"
    yield str(audit.totals)


def describe_step(run: PastRun, step: int, *, shows_all_text: bool) -> Iterator[str]:
    """Describe what the sequences of an optimizer step were made of; gives lines for a terminal.

    Args:
        run: that took the step.
        step: the first is 1.
        shows_all_text: of each piece; else how it begins.

    Raises:
        ConfigError: the ledger does not hold that step.
        DataError: a row cannot be read, or has changed; or the ledger is damaged.
    """
    data, batch = run.config.data, run.config.train.global_batch_size
    if run.config.islands.shares > 1:
        what = "the ledger of an island does not tell its steps apart: lanes come and go"
        raise ConfigError(what, where="step (command line)", found=step, hint="the audit without step=")
    documents = Documents(run.corpus, Encoders.of(run.tokenizer, data, run.images), open_token_cache(data), data)
    num_before, batches = batches_of_steps(run.ledger, batch)
    first, last = num_before + 1, num_before + len(batches)
    if not first <= step <= last:
        raise ConfigError(
            "the ledger does not hold this step",
            where="step (command line)",
            found=step,
            allowed=f"{first} to {last}; the ledger is written with each checkpoint and at the end",
        )
    row = None
    begin = int(batches[step - first]) * batch
    for sample in range(begin, begin + batch):
        number, lane = divmod(sample, len(run.ledger))
        start, stop = np.searchsorted(run.ledger[lane]["sequence"], [number, number + 1]).tolist()
        records = run.ledger[lane][start:stop]
        if not are_readable(records, len(run.corpus.pools), run.corpus.num_documents).all():
            what, audit = (
                "the ledger has records that no run writes",
                shlex.join(["hfdist", "audit", f"run={run.folder}"]),
            )
            where = f"{RunFolder(run.folder).ledger}, lane {lane}, sequence {number}"
            raise DataError(what, where=where, hint=f"{audit}, which names them all")
        pool = run.corpus.pools[records["pool"][0]].name if len(records) else "nothing: the lane had come to its end"
        yield f"sequence {sample} of the run: lane {lane}, sequence {number} of it, from {pool}"
        for record in records:
            row = printable(str(run.corpus.origin(int(record["document"]))))
            yield from _describe(record, row, documents, run.tokenizer, shows_all_text)
    if row is not None:
        yield f"to take a row out and leave all else where it is: {quarantine([row])}"


def _describe(
    record: np.void, row: str, documents: Documents, tokenizer: PreTrainedTokenizerBase, shows_all_text: bool
) -> Iterator[str]:
    status = Status(record["fate"])
    if not record["num_tokens"]:
        yield f"  {row}  passed over: {status.name.replace('_', ' ')}"
        return
    first, total = int(record["first_token"]), int(record["of_tokens"])
    end = first + int(record["num_tokens"])
    note = ", quarantined" if status is Status.quarantined else ""
    yield f"  {row}  tokens {first}..{end - 1} of {total}{note}"
    batch = next(documents.chunks(np.array([record["document"]])))
    (tokens,) = batch.views()
    found = len(tokens) + int(batch.cut_tokens[0])
    if found != total:
        raise DataError("the row has changed since the run", where=row, found=f"{found} tokens")
    # What the model saw: the piece, through the tokenizer and back.
    ids = ids_of(tokens[first:end])
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if shows_all_text:
        # A secret may have several lines.
        yield from (f"      {printable(line)}" for line in mask_secrets(text).split("\n"))
    else:
        yield f"      {printable(text, _SHOWN_CHARACTERS)}"
