"""Okapi BM25 in plain Python: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), equation 3.15.

The weight of a term is that of equation 3.3 with one added within the logarithm, so that none is below zero.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_K1, _B = 1.2, 0.75
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def split_words(text: str) -> list[str]:
    """Give the words of a text in lower case; names are divided at underscores and capitals."""
    return [part.lower() for part in _PART.findall(text)]


def score_all(queries: Sequence[str], documents: Sequence[str]) -> list[list[float]]:
    """Score all documents for each query; shape [queries, documents]."""
    counts = [Counter(split_words(document)) for document in documents]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / len(lengths)
    holders = Counter(word for count in counts for word in count)
    idf = {word: math.log(1 + (len(counts) - n + 0.5) / (n + 0.5)) for word, n in holders.items()}
    norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]
    return [
        [
            sum(idf[w] * c[w] * (_K1 + 1) / (c[w] + norm) for w in words if w in c)
            for c, norm in zip(counts, norms, strict=True)
        ]
        for words in map(split_words, queries)
    ]
