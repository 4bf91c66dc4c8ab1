"""The error of a held-out set without a sequence: it says why there is none, and proposes what changes that."""

from __future__ import annotations

from collections import Counter

from hfdist.config.data import DataConfig
from hfdist.data.documents.corpus import Corpus
from hfdist.data.documents.first_examples import explain_no_targets
from hfdist.data.order.records import Status
from hfdist.data.sources.document_batch import DocumentBatch
from hfdist.errors import DataError

_SHARE = "data.eval_fraction"
_EVALUATE_NOTHING = f"{_SHARE}=0, which evaluates nothing"
_LIKELY_DOCUMENTS = 10
"""Number of held-out documents that a hint aims at: with so many on average, there are some."""
_LARGEST_SHARE = 0.5
"""Largest share that a hint proposes."""


class HeldOutCounts:
    """Counts of what became of the documents that were read for a held-out set."""

    def __init__(self) -> None:
        self.fates: Counter[int] = Counter()
        """Number of documents by their `Status`."""
        self.num_tokens = 0
        """Number of tokens of all documents that are held out."""

    def add(self, chunk: DocumentBatch) -> None:
        """Count the documents of a chunk."""
        self.fates.update(chunk.fates.tolist())
        self.num_tokens += int(chunk.lengths.sum())

    @property
    def num_drawn(self) -> int:
        """Number of documents that fell on the held-out side and have a text; a bad document is on no side."""
        # Of a held-out set, `Status.held_out` says that a document is on the other side: it is trained on.
        others = (Status.held_out, Status.empty, Status.bad)
        return self.fates.total() - sum(self.fates[fate] for fate in others)

    def __str__(self) -> str:
        """Name the reasons for which documents are left out, each with a number; without any, name the tokens."""
        reasons = {Status.no_target: "without a target", Status.too_long: "too long", Status.bad: "bad",
                   Status.empty: "empty", Status.quarantined: "quarantined"}  # fmt: skip
        counted = [f"{self.fates[fate]:,} {words}" for fate, words in reasons.items() if self.fates[fate]]
        return ", ".join(counted) or f"{self.num_tokens:,} tokens"


def explain_nothing(corpus: Corpus, config: DataConfig, counts: HeldOutCounts) -> DataError:
    """Give the error that says why there is no sequence, by `counts` of the documents, and what changes that."""
    if config.eval_fraction == 1 or (corpus.has_examples and counts.num_drawn):
        return _nothing_to_learn(corpus, config, counts)
    if not counts.num_drawn:
        return _none_drawn(corpus, config, counts)
    return _too_few_tokens(config, counts)


def _nothing_to_learn(corpus: Corpus, config: DataConfig, counts: HeldOutCounts) -> DataError:
    """Say why no held-out document has a target, of examples or of sources that are held out as a whole."""
    takes_all = config.eval_fraction == 1
    num_documents = corpus.num_documents if takes_all else counts.num_drawn
    found = f"{num_documents:,} documents: {counts}"
    hint: str | None = None if takes_all else _EVALUATE_NOTHING
    if counts.fates[Status.too_long]:
        hint = "a larger data.sequence_length"
    elif counts.fates[Status.no_target]:
        roles, hint = explain_no_targets(corpus, config)
        found = f"{found}; {roles}" if roles else found
    sources = ", ".join(f"data.eval_sources.{name}" for name in corpus.source_names)
    return DataError(
        "there is nothing to learn in the held-out documents",
        where=sources if takes_all else _SHARE,
        found=found,
        hint=hint,
    )


def _none_drawn(corpus: Corpus, config: DataConfig, counts: HeldOutCounts) -> DataError:
    """Say why no document fell on the held-out side."""
    what = "no document was drawn for the held-out set"
    found = f"{config.eval_fraction:g} of {corpus.num_documents:,} documents"
    if counts.fates[Status.bad]:
        found = f"{found}, of which {counts.fates[Status.bad]:,} were left out as bad"
        if counts.fates[Status.bad] == corpus.num_documents:
            return DataError(what, where=_SHARE, found=found, hint="data.on_bad_rows=error shows what is wrong")
    elif corpus.num_documents and not corpus.has_examples and not _has_text(corpus):
        return DataError("the documents are empty", where=_SHARE, found=found, allowed="documents with text")
    elif corpus.searches_held_out:
        found = f"{found}, which are all alike or empty" if corpus.num_documents > 1 else found
        return DataError(what, where=_SHARE, found=found, allowed="documents that differ", hint=_EVALUATE_NOTHING)
    return DataError(
        what,
        where=_SHARE,
        found=found,
        allowed="a share that holds some documents; 0: no held-out set",
        hint=_hint_of_share(_LIKELY_DOCUMENTS / max(corpus.num_documents, 1), _EVALUATE_NOTHING),
    )


def _has_text(corpus: Corpus) -> bool:
    """Whether some document has more than white space."""
    return any(corpus.text(number).strip() for number in range(corpus.num_documents))


def _too_few_tokens(config: DataConfig, counts: HeldOutCounts) -> DataError:
    """Say that the text of the held-out documents is shorter than a sequence."""
    # Twice the share that would give one sequence, as texts differ in length.
    wanted = 2 * config.eval_fraction * config.sequence_length / max(counts.num_tokens, 1)
    return DataError(
        "the held-out documents do not fill one sequence",
        where=_SHARE,
        found=f"{counts.num_drawn:,} documents of {counts.num_tokens:,} tokens",
        allowed=f"data.sequence_length={config.sequence_length:,} tokens or more; 0: no held-out set",
        hint=_hint_of_share(wanted, f"a smaller data.sequence_length, or {_EVALUATE_NOTHING}"),
    )


def _hint_of_share(wanted: float, otherwise: str) -> str:
    """Give the hint of a larger `data.eval_fraction`, or the hint `otherwise` where that would be too large."""
    if wanted > _LARGEST_SHARE:
        return otherwise
    return f"data.eval_fraction={wanted:.1g}, or {_EVALUATE_NOTHING}"
