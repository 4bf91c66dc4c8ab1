"""Text to token ids, one document at a time, and the identity of a tokenizer."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[np.int32]:
    """Give a document's tokens with one end-of-text token behind; without text: none.

    A beginning-of-text token stands in front only where the tokenizer itself puts one.
    """
    if not text:
        return np.empty(0, dtype=np.int32)
    # verbose: documents may be longer than the model's positions, since they are cut afterwards.
    # split_special_tokens: the text of a document cannot forge the end of one.
    ids = tokenizer(text, verbose=False, split_special_tokens=True)["input_ids"]
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, dtype=np.int32)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (backend.truncation is not None or backend.padding is not None):
        # `encode` uses neither, and the first call of the tokenizer switches both off: they must not tell apart.
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    identity = json.dumps([rules, tokenizer.bos_token_id, tokenizer.eos_token_id])
    return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
