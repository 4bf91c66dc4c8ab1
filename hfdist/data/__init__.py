"""Text to token sequences, in an order that does not depend on the number of processes: the names for other rooms."""

from hfdist.data.documents.corpus import Corpus, open_corpus
from hfdist.data.documents.first_examples import (
    are_alike,
    are_chats,
    are_judged_alike,
    are_silent,
    find_source_without_prompts,
    have_images,
)
from hfdist.data.documents.held_out import (
    HeldOut,
    HeldOutSet,
    HeldOutSources,
    build_held_out,
    open_held_out_sources,
)
from hfdist.data.documents.held_out_images import HeldOutImages
from hfdist.data.order.cursor import Cursor
from hfdist.data.stream.figures import PoolReport, count_steps, count_trained, describe_losses, report
from hfdist.data.stream.ledger import Ledger
from hfdist.data.stream.token_stream import TokenStream

__all__ = [
    "Corpus",
    "Cursor",
    "HeldOut",
    "HeldOutImages",
    "HeldOutSet",
    "HeldOutSources",
    "Ledger",
    "PoolReport",
    "TokenStream",
    "are_alike",
    "are_chats",
    "are_judged_alike",
    "are_silent",
    "build_held_out",
    "count_steps",
    "count_trained",
    "describe_losses",
    "find_source_without_prompts",
    "have_images",
    "open_corpus",
    "open_held_out_sources",
    "report",
]
