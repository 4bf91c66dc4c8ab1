"""hfdist's stream, over the corpus as text and as token files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.data.work import BATCH_SIZE, NUM_WORKERS, SEED, SEQUENCE_LENGTH, TEXT, Work
from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.data import TokenStream, open_corpus
from hfdist.data.pretokenize import pretokenize


class _Stream:
    """What both paths share. Nothing is held out: peers give every document."""

    _stream: TokenStream

    def batches(self, work: Work, state: Any) -> Iterator[Tensor]:
        """See `Loader`."""
        config = self.config(work)
        self._stream = TokenStream(open_corpus(config), work.tokenizer, config)
        if state is not None:
            self._stream.load_state_dict(state)
        # A variable of a loop would keep each batch while the next one is made.
        yield from map(itemgetter("input_ids"), self._stream.loader(batch_size=BATCH_SIZE))

    def state(self) -> Any:
        """The cursor."""
        return self._stream.state_dict()

    def config(self, work: Work) -> DataConfig:
        """Settings of the stream."""
        raise NotImplementedError


class Text(_Stream):
    """Parquet files, with or without the tokens of an earlier epoch."""

    def __init__(self, *, warm: bool) -> None:
        self._warm = warm

    def prepare(self, work: Work) -> None:
        """Read an epoch, if it is to be remembered."""
        shutil.rmtree(self._cache(work), ignore_errors=True)
        if self._warm:
            batches = self.batches(work, None)
            for _ in range(work.num_batches(tokenized=False)):
                next(batches)

    def reset(self, work: Work) -> None:
        """Forget the tokens of the run before."""
        if not self._warm:
            shutil.rmtree(self._cache(work), ignore_errors=True)

    def _cache(self, work: Work) -> Path:
        return work.folder / ("warm" if self._warm else "cold")

    def config(self, work: Work) -> DataConfig:
        """Settings of the stream."""
        sources = {"text": SourceConfig(path=str(work.folder / "text"), text=TEXT)}
        return _config(work, sources, self._cache(work))


class Tokens(_Stream):
    """Token files."""

    def prepare(self, work: Work) -> None:
        """Write them, and as many copies as the others have of the corpus."""
        folders = _copies(work)
        # The last one gets its name when all are whole.
        if folders[-1].exists():
            return
        part = work.folder / "tokens.part"
        sources = {"text": SourceConfig(path=str(work.folder / "text"), text=TEXT)}
        config = _config(work, sources, _cache_of_tokens(work))
        shards = open_corpus(config).shards
        shutil.rmtree(part, ignore_errors=True)
        pretokenize(shards, work.tokenizer, part, workers=config.workers, on_bad_rows=config.on_bad_rows)
        for folder in folders[:-1]:
            shutil.copytree(part, folder, dirs_exist_ok=True)
        part.rename(folders[-1])

    def reset(self, work: Work) -> None:
        """Nothing is left by a run; and a training has a tokenizer, which the peers do not ask for."""
        _ = work.tokenizer

    def config(self, work: Work) -> DataConfig:
        """Settings of the stream."""
        sources = {folder.name: SourceConfig(kind=SourceKind.tokens, path=str(folder)) for folder in _copies(work)}
        return _config(work, sources, _cache_of_tokens(work))


def _cache_of_tokens(work: Work) -> Path:
    return work.folder / "index"


def _copies(work: Work) -> list[Path]:
    return [work.folder / f"tokens{number}" for number in range(work.token_copies)]


def _config(work: Work, sources: dict[str, SourceConfig], cache: Path) -> DataConfig:
    return DataConfig(
        sources=sources,
        sequence_length=SEQUENCE_LENGTH,
        seed=SEED,
        eval_fraction=0.0,
        workers=NUM_WORKERS,
        cache_dir=str(cache),
    )
