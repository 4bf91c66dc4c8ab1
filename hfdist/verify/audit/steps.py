"""What the sequences of one optimizer step were made of: which pieces of which documents, and their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.data.documents.token_reader import Documents
from hfdist.data.order.records import Records, Status
from hfdist.data.packing.sequence import ids_and_labels
from hfdist.errors import ConfigError, DataError, printable
from hfdist.verify.audit.ledger import batches_of_steps

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class StepReader:
    """Shows steps of a run.

    Args:
        ledger: records of all lanes.
        pools: their names.
        global_batch_size: sequences in a step.
        documents: to read from.
        tokenizer: of the run.
    """

    ledger: Sequence[Records]
    pools: Sequence[str]
    global_batch_size: int
    documents: Documents
    tokenizer: PreTrainedTokenizerBase

    def describe(self, step: int, *, shows_all_text: bool) -> Iterator[str]:
        """Give lines for a terminal.

        Args:
            step: the first is 1.
            shows_all_text: of each piece; else how it begins.

        Raises:
            ConfigError: the ledger does not hold that step.
            DataError: a row cannot be read, or has changed.
        """
        num_before, batches = batches_of_steps(self.ledger, self.global_batch_size)
        first, last = num_before + 1, num_before + len(batches)
        if not first <= step <= last:
            raise ConfigError(
                "the ledger does not hold this step",
                where="step (command line)",
                found=step,
                allowed=f"{first} to {last}; the ledger is written with each checkpoint and at the end",
            )
        row = None
        first_sample = int(batches[step - first]) * self.global_batch_size
        for sample in range(first_sample, first_sample + self.global_batch_size):
            number, lane = divmod(sample, len(self.ledger))
            begin, end = np.searchsorted(self.ledger[lane]["sequence"], [number, number + 1]).tolist()
            records = self.ledger[lane][begin:end]
            pool = self.pools[records["pool"][0]] if len(records) else "nothing: the lane had come to its end"
            yield f"sequence {sample} of the run: lane {lane}, sequence {number} of it, from {pool}"
            for record in records:
                row = printable(str(self.documents.corpus.origin(int(record["document"]))))
                yield from self._describe(record, row, shows_all_text)
        if row is not None:
            yield f"to take a row out and leave all else where it is: 'data.quarantine=[\"{row}\"]'"

    def _describe(self, record: np.void, row: str, shows_all_text: bool) -> Iterator[str]:
        fate = Status(record["fate"])
        if not record["num_tokens"]:
            yield f"  {row}  passed over: {fate.name.replace('_', ' ')}"
            return
        first, total = int(record["first_token"]), int(record["of_tokens"])
        end = first + int(record["num_tokens"])
        note = ", quarantined" if fate is Status.quarantined else ""
        yield f"  {row}  tokens {first}..{end - 1} of {total}{note}"
        (document,) = next(self.documents.read([int(record["document"])]))
        found = len(document.tokens) + document.cut_tokens
        if found != total:
            raise DataError("the row has changed since the run", where=row, found=f"{found} tokens")
        # What the model saw: the piece, through the tokenizer and back.
        text = str(
            self.tokenizer.decode(ids_and_labels(document.tokens[first:end])[0], clean_up_tokenization_spaces=False)
        )
        if shows_all_text:
            yield from (f"      {printable(line)}" for line in text.split("\n"))
        else:
            shown = printable(text[:_SHOWN_CHARACTERS])
            yield f"      {shown}{' ...' if len(text) > _SHOWN_CHARACTERS else ''}"
