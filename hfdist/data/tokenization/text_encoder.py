"""A tokenizer as documents need it, and the digest of all that decides their tokens."""

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
"""Text of every kind that tokenizers treat in their own ways: to see whether two ways of calling one agree."""

_WITHOUT_SCORES = ("BPE", "WordPiece", "WordLevel")
"""Kinds of models of `tokenizers` of which a copy has the same text."""

_BARE: dict[str, Any] = {"verbose": False, "split_special_tokens": True, "add_special_tokens": False}


class Encoder:
    """A tokenizer as documents need it: each ends with one end-of-text token.

    A beginning-of-text token stands in front only where the tokenizer itself puts one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._backend: Tokenizer | None = plain_backend(tokenizer)
        if self._backend is not None:
            # A text that is a special token must not forge the end of a document.
            self._backend.encode_special_tokens = True
            if self._fast([_SAMPLE]) != self._by_wrapper([_SAMPLE]):
                self._backend = None

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Give the tokens of documents, each of shape [tokens]; without text: none."""
        ids = iter(self.raw([text for text in texts if text]))
        return [self._with_end(next(ids)) if text else np.empty(0, dtype=np.int32) for text in texts]

    def raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Give the tokens of texts as the tokenizer does, with its own beginnings and ends."""
        return self._by_wrapper(texts) if self._backend is None else self._fast(texts)

    def inside(self, text: str) -> list[int]:
        """Give the tokens of a text that stands after another one: without a beginning, an end or a space in front."""
        before = list(self._tokenizer("\n", **_BARE)["input_ids"])
        ids = list(self._tokenizer("\n" + text, **_BARE)["input_ids"])
        # Some tokenizers put a space in front of every text; a line break that keeps its own tokens takes it instead.
        return ids[len(before) :] if ids[: len(before)] == before else list(self._tokenizer(text, **_BARE)["input_ids"])

    def _fast(self, texts: Sequence[str]) -> list[list[int]]:
        assert self._backend is not None
        # transformers' wrapper takes as long for masks and offsets as the tokenizer for tokens.
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]

    def _by_wrapper(self, texts: Sequence[str]) -> list[list[int]]:
        return [_call(self._tokenizer, text) for text in texts]

    def _with_end(self, ids: list[int]) -> NDArray[np.int32]:
        if not ids or ids[-1] != self._end:
            ids.append(self._end)
        return np.array(ids, dtype=np.int32)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that decides the tokens of a text."""
    # Some classes do more than their vocabulary or their backend says.
    sample = _call(tokenizer, _SAMPLE)
    return digest_of([_rules(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, sample])


def _rules(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # A copy takes four times as long as its text. It is made where that could differ: most classes switch truncation
    # and padding off in a call, and scores of other kinds of models lose their last digits when they are read.
    if backend.truncation or backend.padding or type(backend.model).__name__ not in _WITHOUT_SCORES:
        backend = plain_backend(tokenizer) or backend
    rules: str = backend.to_str()
    return rules


def token_dtype(tokenizer: PreTrainedTokenizerBase, *, examples: bool) -> str:
    """Name the narrowest type of a file's tokens; complements of context tokens take the upper half of four bytes."""
    return "uint16" if not examples and max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32"


def _call(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose: documents may be longer than the model's positions, since they are cut afterwards.
    return list(tokenizer(text, verbose=False, split_special_tokens=True)["input_ids"])


def text_digest(text: str) -> int:
    """Hash of a text in [0, 2**64): equal documents fall on one side of the held-out split, in every file."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"hfdist-eval").digest()
    return int.from_bytes(digest, "little")


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Give a copy of the fast tokenizer inside, if any, without truncation and padding, which documents never use."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend = type(backend).from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend
