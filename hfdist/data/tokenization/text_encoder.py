"""The encoder of plain texts: a tokenizer as documents need it, and the digest of all that decides their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from hfdist.data.cache import digest_of

_SAMPLE = " Hello  world!\n\n\tdef f(x): return x**2  # naïve 日本語 🙂 e\u0301 <|endoftext|></s><s> 12345\r\n"
"""Text with all that tokenizers treat in their own ways, by which two ways of calling one are compared."""

_WITHOUT_SCORES = ("BPE", "WordPiece", "WordLevel")
"""Models of `tokenizers` that have no scores, so that a copy of one is written in the same way."""

_BARE: dict[str, Any] = {"verbose": False, "split_special_tokens": True, "add_special_tokens": False}
"""Arguments with which a tokenizer gives the tokens of a text alone."""


class Encoder:
    """Encodes documents with a tokenizer; each ends with one end-of-text token.

    A beginning-of-text token comes first only where the tokenizer itself puts one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._backend: Tokenizer | None = plain_backend(tokenizer)
        if self._backend is not None:
            # A text that is a special token must not forge the end of a document.
            self._backend.encode_special_tokens = True
            # A tokenizer's class may do more than its backend: it is then called itself.
            if self._fast([_SAMPLE]) != self._by_wrapper([_SAMPLE]):
                self._backend = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Give the tokens of documents, each of shape [tokens]; an empty document has none."""
        ids = iter(self.raw([text for text in texts if text]))
        return [self._with_end(next(ids)) if text else np.empty(0, dtype=np.int32) for text in texts]

    def raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Give the tokens of texts as the tokenizer does, with the special tokens that it adds itself."""
        return self._by_wrapper(texts) if self._backend is None else self._fast(texts)

    def inside(self, text: str) -> list[int]:
        """Give the tokens of a text that follows another one: without special tokens, and without a space in front."""
        before = list(self._tokenizer("\n", **_BARE)["input_ids"])
        ids = list(self._tokenizer("\n" + text, **_BARE)["input_ids"])
        # Some tokenizers put a space in front of every text. It is then in front of the line break, which is cut off if
        # its tokens are still there.
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return list(self._tokenizer(text, **_BARE)["input_ids"])

    def _fast(self, texts: Sequence[str]) -> list[list[int]]:
        """Give the tokens of texts by the backend, in Rust and in several threads."""
        assert self._backend is not None  # the callers have asked
        # transformers' class would take as long again for masks and offsets.
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def _by_wrapper(self, texts: Sequence[str]) -> list[list[int]]:
        """Give the tokens of texts by transformers' class."""
        return [_call(self._tokenizer, text) for text in texts]

    def _with_end(self, ids: list[int]) -> NDArray[np.int32]:
        if not ids or ids[-1] != self._end:
            ids.append(self._end)
        return np.array(ids, dtype=np.int32)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash all that decides the tokens of a text."""
    # A sample, since some classes do more than their vocabulary or their backend says.
    sample = _call(tokenizer, _SAMPLE)
    return digest_of([_rules(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, sample])


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Give the vocabulary and the rules of a tokenizer as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # A copy takes four times as long as writing the text. It is made where the text of the original could differ from
    # run to run: most classes switch truncation and padding off in a call, and scores lose their last digits when they
    # are read.
    if backend.truncation or backend.padding or type(backend.model).__name__ not in _WITHOUT_SCORES:
        backend = plain_backend(tokenizer) or backend
    rules: str = backend.to_str()
    return rules


def token_dtype(tokenizer: PreTrainedTokenizerBase, *, examples: bool) -> str:
    """Name the narrowest type of a token file: "uint16" or "uint32"."""
    # Complements of context tokens, which examples have, take the upper half of four bytes.
    is_narrow = not examples and max(tokenizer.get_vocab().values()) < 1 << 16
    return "uint16" if is_narrow else "uint32"


def _call(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Give the tokens of a text; special tokens in it become the tokens of their letters."""
    # verbose: documents may be longer than the model's positions, since they are cut afterwards.
    return list(tokenizer(text, verbose=False, split_special_tokens=True)["input_ids"])


def text_digest(text: str) -> int:
    """Hash a text to a number in [0, 2**64), which decides whether it is held out: equal texts are on one side."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"hfdist-eval").digest()
    return int.from_bytes(digest, "little")


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Give a copy of the tokenizer's backend without truncation and padding; None: the tokenizer is not a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend = type(backend).from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend
