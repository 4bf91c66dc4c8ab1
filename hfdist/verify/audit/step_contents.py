"""What the sequences of one step of a past run were made of."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.data.documents.bad_rows import quarantine
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.marks import ids_of
from hfdist.data.order.records import Status
from hfdist.data.tokenization.encoders import Encoders
from hfdist.errors import ConfigError, DataError, printable
from hfdist.records import RunFolder
from hfdist.secrets import mask_secrets
from hfdist.verify.audit.lane_audit import are_readable
from hfdist.verify.audit.past_run import PastRun, batches_of_steps

_SHOWN_CHARACTERS = 80


def describe_step(run: PastRun, step: int, *, shows_all_text: bool) -> Iterator[str]:
    """Describe what the sequences of an optimizer step were made of; gives lines for a terminal.

    Args:
        run: the run that took the step.
        step: number of the step; the first is 1.
        shows_all_text: whether all text of each piece is shown, and not only how it begins.

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
