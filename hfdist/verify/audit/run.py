"""The audit of a past run, as lines for a terminal, the verdict last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hfdist.data import TokenStream
from hfdist.errors import DataError
from hfdist.host_cores import usable_cores
from hfdist.records import RunFolder
from hfdist.verify.audit.exactly_once import Audit
from hfdist.verify.audit.past_run import PastRun, batches_of_steps

_MANY_RECORDS = 2**20
"""Records of a ledger from which on other processes save more time than their start takes."""


def prove_once(run: PastRun, *, processes: int | None = None) -> Iterator[str]:
    """Compare the ledger with the plan, and say what was found.

    Args:
        run: the run to be proved.
        processes: number of processes among which its lanes are dealt; None: as many as cores, 1 for a small ledger.

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
