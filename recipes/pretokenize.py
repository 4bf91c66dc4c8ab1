"""Tokenize a corpus once, into `<run.dir>/tokens`, so that runs read tokens instead of text. Takes one process.

python recipes/pretokenize.py data=files 'data.sources.files.path="/texts/*.parquet"' data.workers=8 run.name=texts
"""

from hfdist.config.cli.command import recipe
from hfdist.config.run import RunConfig


@recipe(primary="pretrain", takes_ranks=False, trains=False)
def main(config: RunConfig) -> None:
    """Open the corpus, find or train its tokenizer, and write the token files."""
    # Imported here, so that --help and a misspelt key need no torch.
    from hfdist.config.data import cache_dir, read_shard
    from hfdist.data import open_corpus
    from hfdist.data.pretokenize import pretokenize, report_tokenized
    from hfdist.data.tokenization.chat_template import adopt_template
    from hfdist.models.tokenizer import load_tokenizer
    from hfdist.processes.startup import reporting
    from hfdist.run.logs import set_up_logging
    from hfdist.topology import Topology

    set_up_logging(Topology())
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


if __name__ == "__main__":
    main()
