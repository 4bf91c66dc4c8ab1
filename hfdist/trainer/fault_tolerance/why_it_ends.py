"""What a run says that ends because it cannot go on: the steps, the documents that were read, and what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from hfdist.collectives import on_rank_zero
from hfdist.data.documents.bad_rows import quarantine
from hfdist.data.stream.ledger import read_records
from hfdist.errors import NumericsError, printable
from hfdist.records import RunFolder
from hfdist.trainer.fault_tolerance.skip_counter import SkipCounter, Skipped
from hfdist.trainer.training import Training
from hfdist.units import list_first

_MOST_NAMES = 4
"""Documents that a message names; the audit shows the others."""


def too_many_skipped(training: Training, counter: SkipCounter) -> NumericsError:
    """Give the error of a run that has skipped too many steps in a row. A collective."""
    skipped = counter.skipped
    names = on_rank_zero(lambda: _name_documents(training, skipped[0]))
    read = [f"it read {list_first(names, _MOST_NAMES)}"] if names else []
    run = shlex.quote(f"run={training.args.output_dir}")
    audit = f"hfdist audit {run} step={skipped[0].step}"
    look = f"{audit} shows the documents; {quarantine(names[:_MOST_NAMES])} takes some out; or " if names else ""
    return NumericsError(
        f"the loss or the gradient was not finite {len(skipped)} steps in a row, {_why_no_way_back(training, counter)}",
        where=f"step {skipped[0].step}",
        found=(str(skipped[0]), *read, *(f"step {later.step}: {later}" for later in skipped[1:])),
        hint=f"{look}a lower optimizer.lr or train.max_grad_norm, a longer warm-up, or train.precision=fp32; "
        "checkpoints are from before it",
    )


def unequal_replicas(training: Training, counter: SkipCounter, step: int, differences: list[str]) -> NumericsError:
    """Give the error of ranks whose parameters differ after a step, and how they do."""
    what = f"ranks that hold the same parameters do not hold the same bits, {_why_no_way_back(training, counter)}"
    hint = (
        "leave the named host out: its memory or its device is likely faulty; on machines of different kinds, "
        "which round differently, train.compare_replicas_every=null"
    )
    return NumericsError(what, where=f"step {step}", found=tuple(differences), hint=hint)


def _why_no_way_back(training: Training, counter: SkipCounter) -> str:
    if not counter.may_roll_back:
        return f"and the run has gone back {counter.rollbacks} times without getting beyond it"
    if training.stream is None:
        return "and only a hfdist TokenStream can go back to a checkpoint while the run goes on"
    return "and there is no checkpoint to go back to"


def _name_documents(training: Training, skipped: Skipped) -> list[str]:
    """SOURCE:FILE:ROW of what was trained on; only of the data ranks whose loss was not finite, if any."""
    stream, strategy = training.stream, training.strategy
    if stream is None or stream.ledger is None:
        return []
    documents: dict[int, None] = {}
    for sample in range(skipped.end_sample - strategy.batch.global_batch_size, skipped.end_sample):
        number, lane = divmod(sample, stream.config.lanes)
        if skipped.data_ranks and lane % strategy.topology.data not in skipped.data_ranks:
            continue
        records = read_records(RunFolder(Path(str(training.args.output_dir))).ledger, lane)
        begin, end = np.searchsorted(records["sequence"], [number, number + 1]).tolist()
        records = records[begin:end]
        documents |= dict.fromkeys(records["document"][records["num_tokens"] > 0].tolist())
    return [printable(str(stream.corpus.origin(document))) for document in documents]
