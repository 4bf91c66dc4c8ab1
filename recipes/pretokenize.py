"""Tokenize a corpus once, into `<run.dir>/tokens`, so that runs read tokens instead of text. Takes one process.

python recipes/pretokenize.py data=files 'data.sources.files.path="/texts/*.parquet"' data.workers=8 run.name=texts
"""

from hfdist.config.cli.command import recipe
from hfdist.config.run import RunConfig


@recipe(primary="pretrain", takes_ranks=False, trains=False)
def main(config: RunConfig) -> None:
    """Open the corpus, find or train its tokenizer, and write the token files."""
    # Imported here, so that --help and a misspelt key need no torch.
    from hfdist.run.logs import set_up_logging
    from hfdist.run.pretokenize import pretokenize_share
    from hfdist.topology import Topology

    set_up_logging(Topology())
    pretokenize_share(config)


if __name__ == "__main__":
    main()
