"""The run's tokenizer: from the Hub or a folder, or a byte-level BPE trained on the corpus once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfdist.apart import do_apart
from hfdist.config.model import ModelConfig, TokenizerConfig
from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.once import make_once
from hfdist.models.resolve import resolve_tokenizer

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
"""The special token of tokenizers that are trained here."""
_FORMAT = 1
"""Version of trained tokenizers, to be raised when `train_bpe` makes another tokenizer of the same texts."""
_SAMPLE = "Words, 1234 numbers\n\tand\u00a0signs: {[(<|x|>)]}; \u00e4\u4e2d\U0001f600 " * 8
"""A text that a tokenizer of somebody else must encode, in a process with limits, before it is used here."""


def load_tokenizer(
    config: ModelConfig, *, corpus_id: str, texts: Callable[[int], Iterable[str]], cache_dir: Path
) -> PreTrainedTokenizerBase:
    """Give the tokenizer that `model.tokenizer` names, or the cached one trained on the corpus.

    Args:
        config: the model's config; the tokenizer's repository code runs only with its `trust_remote_code`.
        corpus_id: identity of the corpus and of its held-out split; part of the name of the cached folder.
        texts: gives training documents up to a number of bytes.
        cache_dir: folder of trained and converted tokenizers, which all processes of the machine share.

    Raises:
        ConfigError: no such tokenizer, or one without an end-of-text token.
    """
    if config.tokenizer.name is None:
        return _trained(config.tokenizer, corpus_id=corpus_id, texts=texts, cache_dir=cache_dir)
    return load_pretrained_tokenizer(config, cache_dir=cache_dir)


def load_pretrained_tokenizer(config: ModelConfig, *, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Give the tokenizer that `model.tokenizer.name` names.

    Args:
        config: the model's config; the tokenizer's repository code runs only with its `trust_remote_code`.
        cache_dir: folder of converted tokenizers, which all processes of the machine share.

    Raises:
        ConfigError: no such tokenizer, or one without an end-of-text token.
        ResourceError: the Hub does not answer, or the disk is full.
    """
    folder = resolve_tokenizer(config, cache_dir=cache_dir).name

    def load() -> PreTrainedTokenizerBase:
        with reading_from_hub("model.tokenizer.name", str(config.tokenizer.name)):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
            # Where the files do not name a class, transformers may make something that is no tokenizer of text.
            return as_tokenizer(tokenizer)

    if not config.trust_remote_code:
        do_apart(lambda: load()(_SAMPLE), where="model.tokenizer.name", found=folder)
    tokenizer = load()
    if tokenizer.eos_token_id is None and tokenizer.sep_token is not None:
        # Tokenizers of encoders have no end-of-text token, and put this one after each text.
        tokenizer.eos_token = tokenizer.sep_token
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-text token, which separates documents",
            where="model.tokenizer.name",
            found=config.tokenizer.name,
            hint="set `eos_token` in its tokenizer_config.json",
        )
    return tokenizer


def as_tokenizer(loaded: object) -> PreTrainedTokenizerBase:
    """Check that a loaded object is a tokenizer of text, and give it.

    Raises:
        ValueError: it is none, or one that knows special tokens only.
    """
    refusal = ValueError("its files make no tokenizer")
    if not isinstance(loaded, PreTrainedTokenizerBase) or not isinstance(loaded.eos_token_id, int | None):
        raise refusal
    # For a folder without a tokenizer's files, transformers makes one that knows special tokens only.
    if len(loaded) <= len(set(loaded.all_special_ids)):
        raise refusal
    return loaded


def _trained(
    config: TokenizerConfig, *, corpus_id: str, texts: Callable[[int], Iterable[str]], cache_dir: Path
) -> PreTrainedTokenizerBase:
    """Give the byte-level BPE of a corpus: the one in the cache, or one that is trained now and cached."""
    identity = json.dumps([_FORMAT, corpus_id, config.vocab_size, config.train_bytes])
    key = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    folder = cache_dir / "tokenizers" / f"bpe-{config.vocab_size}-{key}"

    def write(temporary: Path) -> None:
        logger.info("training a byte-level BPE of %d tokens, once", config.vocab_size)
        train_bpe(texts(config.train_bytes), config.vocab_size).save_pretrained(temporary)

    return PreTrainedTokenizerFast.from_pretrained(make_once(folder, write))


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: every string can be encoded and decodes to itself.

    Args:
        texts: the training documents.
        vocab_size: number of tokens, with all 256 bytes and the end-of-text token.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one, so that numbers have one spelling; the rest as in GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
