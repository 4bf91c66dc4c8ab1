"""Note once what each file of a corpus holds, into `<run.dir>/index`, so that no rank of a run opens them at its start.

python recipes/index.py data=files 'data.sources.files.path="/texts/*.parquet"' run.name=texts data.shard=0/4
"""

from hfdist.config.cli.command import recipe
from hfdist.config.run import RunConfig


@recipe(primary="pretrain", takes_ranks=False, trains=False)
def main(config: RunConfig) -> None:
    """Index the sources of files, or compare their index with them."""
    # Imported here, so that --help and a misspelt key need no torch.
    from hfdist.data.index import index_sources
    from hfdist.processes.startup import reporting
    from hfdist.run.logs import set_up_logging
    from hfdist.topology import Topology

    set_up_logging(Topology())
    with reporting("indexing the files"):
        index_sources(config.data, config.run.folder.index)


if __name__ == "__main__":
    main()
