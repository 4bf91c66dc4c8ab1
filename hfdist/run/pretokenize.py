"""Tokenize what a config names: its corpus, by its tokenizer, into its run's folder."""

from __future__ import annotations

from hfdist.config.data import cache_dir, read_shard
from hfdist.config.run import RunConfig
from hfdist.data import open_corpus
from hfdist.data.pretokenize import pretokenize, report_tokenized
from hfdist.data.tokenization.chat_template import adopt_template
from hfdist.models.tokenizer import load_tokenizer
from hfdist.processes.startup import reporting


def pretokenize_share(config: RunConfig) -> None:
    """Write the token files of `data.shard` into `<run.dir>/tokens`, but for those that are there.

    Any process may do it that sees the corpus and the folder, such as a task of Ray. Who comes last completes it.

    Raises:
        ConfigError: the folder holds other tokens, or another process has the same share.
        DataError: a file or a row cannot be read, or another share was made of something else.
        ResourceError: the disk is full, or a worker has died.
    """
    with reporting("opening the files"):
        corpus = open_corpus(config.data, reads_all=True)
    tokenizer = load_tokenizer(
        config.model, corpus_id=corpus.fingerprint, texts=corpus.training_texts, cache_dir=cache_dir(config.data)
    )
    adopt_template(tokenizer, config.data.chat)
    folder = config.run.folder.tokens
    made = pretokenize(
        corpus.shards,
        tokenizer,
        folder,
        workers=config.data.workers,
        on_bad_rows=config.data.on_bad_rows,
        chat=config.data.chat,
        share=read_shard(config.data.shard),
        progress=config.report.progress,
    )
    if made is not None:
        report_tokenized(made, folder, vocab_size=len(tokenizer) if config.model.tokenizer.name is None else None)
