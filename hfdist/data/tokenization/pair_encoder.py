"""The source and the target of an encoder-decoder to tokens, as the tokenizer itself encodes either side."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import PairsConfig
from hfdist.data.marks import Tokens
from hfdist.data.sources.base import ContentError
from hfdist.errors import ConfigError, nearest

_SHOWN_CHARACTERS = 80
_SAMPLE = "A text, written in 12 words."
"""Text by which it is seen whether the tokenizer encodes targets in another way than sources."""
_LANGUAGES = {"source_language": "src_lang", "target_language": "tgt_lang"}
"""Keys of the config, and the attributes of tokenizers of several languages that they set."""


def adopt_languages(tokenizer: PreTrainedTokenizerBase, config: PairsConfig) -> None:
    """Set the languages that the config names in the tokenizer itself, so that the model is saved with them.

    Raises:
        ConfigError: The tokenizer has no languages, or not this one.
    """
    for key, attribute in _LANGUAGES.items():
        language, where = getattr(config, key), f"data.pairs.{key}"
        if language is None:
            continue
        if not hasattr(tokenizer, attribute):
            what = "this tokenizer has no languages"
            found = f"{language}, with {type(tokenizer).__name__}"
            raise ConfigError(what, where=where, found=found, allowed="null", hint=f"{where}=null")
        codes = getattr(tokenizer, "lang_code_to_id", None) or getattr(tokenizer, "lang_code_to_token", None)
        known = list(codes or tokenizer.extra_special_tokens)
        if known and language not in known:
            what, hint = "the tokenizer does not know this language", nearest(language, known, f"{where}={{}}")
            raise ConfigError(what, where=where, found=language, allowed=", ".join(map(str, known)), hint=hint)
        setattr(tokenizer, attribute, language)


class PairEncoder:
    """Encodes pairs: the tokens of a source are context, and those of its target, after them, are learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PairsConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def encode(self, source: str, target: str) -> Tokens:
        """Give the tokens of a source, as complements, and of its target; shape [tokens of both].

        Raises:
            ContentError: The tokenizer has no token for one of them.
        """
        context = self.source(source)
        _check_tokens(context, "source", source)
        targets = self._call(self._config.max_target_tokens, text_target=target)
        _check_tokens(targets, "target", target)
        return np.concatenate([~np.array(context, dtype=np.int32), np.array(targets, dtype=np.int32)])

    def source(self, text: str) -> list[int]:
        """Give the tokens of a source, after those of `data.pairs.source_prompt`."""
        return self._call(self._config.max_source_tokens, text=self._config.source_prompt + text)

    def target_sample(self) -> list[int] | None:
        """Give the tokens of a sample text as a target; None: the tokenizer encodes a target as it does a source."""
        found = self._call(None, text_target=_SAMPLE)
        return None if found == self._call(None, text=_SAMPLE) else found

    def _call(self, most_tokens: int | None, **text: str) -> list[int]:
        """Call the tokenizer with `text=` for a source, or `text_target=` for a target."""
        cut = {} if most_tokens is None else {"truncation": True, "max_length": most_tokens}
        # A text that is a special token must not forge one; longer texts than the model's positions are refused later.
        ids = self._tokenizer(**text, verbose=False, split_special_tokens=True, **cut)["input_ids"]
        return list(ids)


def _check_tokens(ids: list[int], side: str, text: str) -> None:
    """Raise a ContentError where a text of a side has no token."""
    if not ids:
        raise ContentError(f"the tokenizer has no token for the {side}", found=text[:_SHOWN_CHARACTERS])
