"""A run's folder opened for an audit: its data as the run opened them, its ledger, and what its checkpoints count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.checkpoint import read_state
from hfdist.checkpoint.folder import STEP_NAME
from hfdist.checkpoint.manifest import MANIFEST
from hfdist.config.run import RunConfig
from hfdist.data import LEDGER, Corpus, Cursor, TokenStream, cache_dir, open_corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order.records import Records
from hfdist.data.tokenization.encoders import Encoders
from hfdist.errors import DataError
from hfdist.models.tokenizer import load_tokenizer
from hfdist.topology import Topology
from hfdist.trainer.checkpointing.checkpointer import CHECKPOINTS
from hfdist.trainer.reporting.logs import set_up_logging
from hfdist.verify.audit.exactly_once import Audited, audit
from hfdist.verify.audit.ledger import batches_of_steps, read_ledger
from hfdist.verify.audit.steps import StepReader


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """What a run has left, and what it read."""

    folder: Path
    config: RunConfig
    ledger: list[Records]
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase
    cursors: dict[int, Cursor]
    """Of the checkpoints that are there, by their steps."""


def open_past_run(folder: Path, config: RunConfig) -> PastRun:
    """Open what is needed, in the order in which mistakes are cheapest to find.

    Raises:
        ConfigError, DataError: the run has no ledger, or its data are not what they were.
        CheckpointError: a checkpoint is damaged.
    """
    set_up_logging(Topology())
    ledger = read_ledger(folder / LEDGER, config.data.lanes)
    cursors = read_cursors(folder / CHECKPOINTS)
    corpus = open_corpus(config.data)
    changes = corpus.inventory.changes_since(cursors[max(cursors)].contents, folder / LEDGER) if cursors else []
    if changes:
        raise DataError(
            "files have changed since the run",
            where="; ".join(changes),
            hint="an audit needs the data as the run read them",
        )
    tokenizer = load_tokenizer(
        config.model, corpus_id=corpus.fingerprint, texts=corpus.training_texts, cache_dir=cache_dir(config.data)
    )
    return PastRun(folder=folder, config=config, ledger=ledger, corpus=corpus, tokenizer=tokenizer, cursors=cursors)


def read_cursors(folder: Path) -> dict[int, Cursor]:
    """Read where the stream stood at each finished checkpoint of a run.

    Raises:
        CheckpointError: one is damaged.
    """
    cursors = {}
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        match = STEP_NAME.fullmatch(path.parent.name)
        if match is None:
            continue
        cursors[int(match[1])] = Cursor.from_json(read_state(path.parent).get("cursor"))
    return cursors


def prove_once(run: PastRun) -> Iterator[str]:
    """Compare the ledger with the plan; gives lines for a terminal, the verdict last.

    Raises:
        DataError: not every document was read as planned, once all of it is told; or the data have changed.
    """
    data, batch = run.config.data, run.config.train.global_batch_size
    stream = TokenStream(run.corpus, run.tokenizer, data, global_batch_size=batch)
    audited = audit(
        run.ledger,
        run.corpus,
        stream.plan,
        run.cursors,
        identity=stream.state_dict()["identity"],
        global_batch_size=batch,
    )
    yield from _summarize(run, audited)
    if audited.passed:
        yield "AUDIT: passed: every document was seen exactly as often as planned"
        return
    yield str(audited.findings)
    yield "AUDIT: failed"
    raise DataError(
        "the ledger is not what the run was to read",
        where=str(run.folder / LEDGER),
        found="; ".join(f"{kind.value}: {count:,}" for kind, count in audited.findings.counts.items()),
    )


def _summarize(run: PastRun, audited: Audited) -> Iterator[str]:
    batch = run.config.train.global_batch_size
    num_sequences = audited.samples - audited.first_sample
    first_step, batches = batches_of_steps(run.ledger, batch)
    num_steps = int(np.searchsorted(batches, -(-audited.samples // batch)))
    steps = f"steps {first_step + 1} to {first_step + num_steps}"
    lanes = f"{num_sequences:,} sequences of {run.config.data.lanes} lanes"
    yield f"{run.folder}: {steps}, {lanes}, {audited.totals.tokens:,} tokens"
    if first_step:
        yield f"the run began from another run's checkpoint of step {first_step}; what came before is in its ledger"
    if run.cursors:
        yield f"checkpoints compared: steps {', '.join(map(str, sorted(run.cursors)))}"
    else:
        yield "there is no checkpoint to compare with: the last documents of each lane may be missing unnoticed"
    yield str(audited.totals)


def describe_step(run: PastRun, step: int, *, shows_all_text: bool) -> Iterator[str]:
    """Say what a step read; gives lines for a terminal.

    Raises:
        ConfigError: the ledger does not hold it.
        DataError: a row cannot be read any more.
    """
    data = run.config.data
    documents = Documents(run.corpus, Encoders(run.tokenizer, data.chat), open_token_cache(data), data)
    pools = [pool.name for pool in run.corpus.pools]
    reader = StepReader(run.ledger, pools, run.config.train.global_batch_size, documents, run.tokenizer)
    yield from reader.describe(step, shows_all_text=shows_all_text)
