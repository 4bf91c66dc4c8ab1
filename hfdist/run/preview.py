"""The next sequences of a stream as text, with the tokens marked that a loss or a reward looks at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import RowFormat
from hfdist.config.task import TaskConfig
from hfdist.data import TokenStream
from hfdist.data.packing.sequence import IGNORED, INPUT_IDS, LABELS, POSITION_IDS, PackedSequence
from hfdist.errors import printable

_OPEN, _SHUT = "\u27e6", "\u27e7"
"""Brackets around marked tokens, which texts hardly have themselves."""
_MOST_CHARACTERS = 600
"""The most characters that are shown of a text between two brackets."""
_ROLES = {
    RowFormat.preference: ("chosen", "rejected"),
    RowFormat.unpaired_preference: ("chosen", "rejected"),
    RowFormat.retrieval: ("query", "text"),
}
"""The roles of a row's documents: of one whose labels are plain, and of one whose labels are below `IGNORED`."""


def preview(stream: TokenStream, tokenizer: PreTrainedTokenizerBase, count: int, task: TaskConfig) -> Iterator[str]:
    """Show the next sequences of a stream, decoded from what the model gets; the stream stays where it is."""
    for number, (_, _, sequence) in enumerate(islice(stream.packed(0, 1), count), 1):
        num_targets = int((sequence.rows[LABELS] != IGNORED).sum())
        share = 100 * num_targets / max(sequence.num_tokens, 1)
        what = name_of_targets(task)
        head = f"sequence {number}: {sequence.num_tokens:,} tokens, {num_targets:,} of them {what} ({share:.1f} %)"
        texts = [text.replace("\n", "\n  ") for text in _documents(sequence, tokenizer, task)]
        yield f"{head}, between {_OPEN} and {_SHUT}\n  " + "\n  --\n  ".join(texts)


def name_of_targets(task: TaskConfig) -> str:
    """Name the tokens that an example marks as its answer, for a sentence such as "12 of them targets"."""
    if task.name.traits.hides_tokens:
        # Which of them are hidden is drawn in training.
        return "such as may be hidden"
    # With rewards the answer is compared, and not learned.
    return "of the reference" if task.name.traits.is_reinforcement else "targets"


def _documents(sequence: PackedSequence, tokenizer: PreTrainedTokenizerBase, task: TaskConfig) -> Iterator[str]:
    """Give the text of each document of a sequence, after its role in its example if it has one."""
    traits = task.name.traits
    roles = None if traits.row_format is None else _ROLES.get(traits.row_format)
    rows = sequence.rows[:, : sequence.num_tokens]
    starts = [*np.flatnonzero(rows[POSITION_IDS] == 0).tolist(), rows.shape[1]]
    for start, stop in pairwise(starts):
        labels = rows[LABELS, start:stop]
        ids = rows[INPUT_IDS, start:stop]
        text = _mark_targets(ids, labels != IGNORED, tokenizer, are_numbers=traits.head.gives_labels)
        if roles is None:
            yield text
        else:
            plain_role, marked_role = roles
            is_marked = bool((labels < IGNORED).any())
            yield f"{marked_role if is_marked else plain_role}: {text}"


def _mark_targets(
    ids: NDArray[np.integer], is_target: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase, *, are_numbers: bool
) -> str:
    """Decode the tokens of one document, with brackets around each run of targets.

    `are_numbers`: a target is the number of a label, and no word of the vocabulary.
    """
    edges = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(ids)]
    shown, before = "", ""
    for first, end in pairwise(edges):
        # The text is decoded from its beginning each time: a piece alone may lose the space before it.
        text = str(tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        piece = _safe(text[len(before) :])
        if are_numbers and is_target[first]:
            piece = " ".join(map(str, ids[first:end].tolist()))
        shown += f"{_OPEN}{piece}{_SHUT}" if is_target[first] else piece
        before = text
    return shown


def _safe(text: str) -> str:
    """Remove control characters, so that data cannot write to the terminal; of a long text, leave out the middle."""
    safe = "\n".join(map(printable, text.split("\n")))
    if len(safe) <= _MOST_CHARACTERS:
        return safe
    half = _MOST_CHARACTERS // 2
    return f"{safe[:half]} [{len(safe) - 2 * half:,} characters] {safe[-half:]}"
