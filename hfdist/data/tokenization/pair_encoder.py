"""Sources and targets of an encoder-decoder as tokens: the tokenizer's own, with its special tokens."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from hfdist.config.data import PairsConfig
from hfdist.data.marks import Tokens
from hfdist.data.sources.base import ContentError
from hfdist.errors import ConfigError, nearest

_SHOWN_CHARACTERS = 80
_SAMPLE = "A text, written in 12 words."
_LANGUAGES = {"source_language": "src_lang", "target_language": "tgt_lang"}
"""Our keys, and the attributes of tokenizers of several languages."""


def adopt_languages(tokenizer: PreTrainedTokenizerBase, config: PairsConfig) -> None:
    """Set the languages of a tokenizer that has some, in place, so that the model is saved with them.

    Raises:
        ConfigError: the tokenizer has no languages, or not this one.
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
    """Makes one array of a source, whose tokens are context, and its target, whose tokens are targets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PairsConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def encode(self, source: str, target: str) -> Tokens:
        """Give the tokens of a row; shape [tokens of the source and the target].

        Raises:
            ContentError: the tokenizer has no token for one of them.
        """
        sides = (
            (self.source(source), "source", source),
            (self._call(self._config.max_target_tokens, text_target=target), "target", target),
        )
        for ids, name, text in sides:
            if not ids:
                raise ContentError(f"the tokenizer has no token for the {name}", found=text[:_SHOWN_CHARACTERS])
        (context, *_), (targets, *_) = sides
        return np.concatenate([~np.array(context, dtype=np.int32), np.array(targets, dtype=np.int32)])

    def source(self, text: str) -> list[int]:
        """Give the tokens of a source, with what is put before it."""
        return self._call(self._config.max_source_tokens, text=self._config.source_prompt + text)

    def target_sample(self) -> list[int] | None:
        """Give the tokens of a sample as a target; None: they are those of a source."""
        found = self._call(None, text_target=_SAMPLE)
        return None if found == self._call(None, text=_SAMPLE) else found

    def _call(self, most: int | None, **text: str) -> list[int]:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        # A text that is a special token must not forge one; longer texts than the model's positions are refused later.
        ids = self._tokenizer(**text, verbose=False, split_special_tokens=True, **cut)["input_ids"]
        return list(ids)
