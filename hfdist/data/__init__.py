"""Text to token sequences, in an order that does not depend on the number of processes."""

from hfdist.data.corpus import Corpus, cache_dir, open_corpus
from hfdist.data.cursor import Cursor
from hfdist.data.heldout import HeldOut, build_held_out
from hfdist.data.stream import StreamLoader, TokenStream

__all__ = [
    "Corpus",
    "Cursor",
    "HeldOut",
    "StreamLoader",
    "TokenStream",
    "build_held_out",
    "cache_dir",
    "open_corpus",
]
