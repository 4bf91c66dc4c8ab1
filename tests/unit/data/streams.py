"""Corpora in memory, and the ranks of one run stepped together."""

from __future__ import annotations

import json

import datasets
import torch

from hfdist.config.data import DataConfig, Packing, SourceConfig
from hfdist.data import Cursor, TokenStream, open_corpus
from tests.unit.data.corpora import texts, tokenizer

NAMES = ("input_ids", "position_ids", "labels")


def memory_corpus(config: DataConfig, **sources):
    """A corpus of lists of texts, one for each source; without any: the small real one, in two sources."""
    given = sources or {"a": texts()[:60], "b": texts()[60:]}
    return open_corpus(config, {name: datasets.Dataset.from_dict({"text": list(t)}) for name, t in given.items()})


def memory_config(cache_dir, *, weights=None, epochs=None, **settings) -> DataConfig:
    """Short sequences and few lanes. Sources are given to `memory_corpus`; weights and epochs by their names."""
    defaults = {"sequence_length": 32, "lanes": 12, "eval_fraction": 0.1, "eval_sequences": 8}
    defaults |= {"workers": 0, "prefetch": 4}
    names = {*(weights or {}), *(epochs or {})}
    sources = {
        name: SourceConfig(path="memory", weight=(weights or {}).get(name), epochs=(epochs or {}).get(name))
        for name in names
    }
    return DataConfig(sources=sources, cache_dir=str(cache_dir), **{**defaults, **settings})


class Run:
    """The data ranks of one run, stepped together."""

    def __init__(
        self, corpus, config, data_size, state=None, *, global_batch=12, ledger=None, encoder=None, columns=None
    ):
        self.streams = [
            TokenStream(
                corpus,
                encoder or tokenizer(),
                config,
                data_rank=rank,
                data_size=data_size,
                global_batch_size=global_batch,
            )
            for rank in range(data_size)
        ]
        for stream in self.streams:
            stream.ledger = ledger() if ledger is not None else None
            if state is not None:
                stream.load_state_dict(state, columns)
        self.batches = [iter(stream.loader(batch_size=global_batch // data_size)) for stream in self.streams]

    def step(self):
        """One global batch, its sequences in the order of the run."""
        shares = [next(batches) for batches in self.batches]
        length = max(share["input_ids"].shape[1] for share in shares)
        return {
            name: torch.stack([fill_up(share[name], length, name) for share in shares], dim=1).flatten(0, 1)
            for name in shares[0]
        }

    def state(self):
        cursors = [Cursor.from_json(stream.state_dict()) for stream in self.streams]
        return json.loads(json.dumps(Cursor.merge(cursors).to_json()))

    def flush(self):
        for stream in self.streams:
            stream.ledger.flush()


def fill_up(rows, length, name):
    """Under `none`, ranks have batches of different lengths."""
    fill = {"labels": -100, "attention_mask": 0}.get(name, tokenizer().eos_token_id)
    return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=fill)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        # Filling may differ where lengths do.
        length = min(ours[name].shape[1], theirs[name].shape[1])
        assert torch.equal(ours[name][:, :length], theirs[name][:, :length]), name


PACKINGS = tuple(packing for packing in Packing if packing is not Packing.auto)
