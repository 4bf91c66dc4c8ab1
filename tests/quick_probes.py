"""What a run asks of small models and of files before it trains, asked once a session: most tests are of what follows.

Each rank of each run would ask anew: a fifth of a small run that tunes, and half of one with images. How it is asked is
tested in tests/unit, and here by modules that say `ASKS_ANEW`. Answers are in a folder of the session, as ranks are
forks that do not live on.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from hfdist.models import architecture, attention_choice, processor, tokenizer
from hfdist.run import images, model

PROBES = (
    (attention_choice, "find_by_documents"),
    (model, "check_reads_no_further"),
    (model, "check_reads_texts"),
    (images, "why_rows_mix"),
)
"""Pure functions of what they are given, each where it is called. A refusal is an error, which is not kept."""
READERS = (architecture, processor, tokenizer)
"""They read a file in a process with limits, and then here: a file that was read so is not read apart again."""


def quick_probes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let them remember what they have found, in `folder`."""
    for module, name in PROBES:
        patch.setattr(module, name, _remembering(getattr(module, name), folder))
    for module in READERS:
        patch.setattr(module, "do_apart", _reading_once(module.do_apart, folder))


def _remembering(probe: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    @functools.wraps(probe)
    def remembered(*arguments: Any, **named: Any) -> Any:
        # Batches of a trial are made once.
        given = [value() if callable(value) else value for value in arguments]
        path = _place(folder, probe.__qualname__, *map(_comparable, given), sorted(named.items()))
        if not path.exists():
            pairs = zip(arguments, given, strict=True)
            whole = [functools.partial(_itself, one) if callable(value) else value for value, one in pairs]
            _keep(path, pickle.dumps(probe(*whole, **named)))
        return pickle.loads(path.read_bytes())

    return remembered


def _reading_once(do_apart: Callable[..., None], folder: Path) -> Callable[..., None]:
    def read_once(do: Callable[[], object], *, where: str, found: object) -> None:
        files = [*_files(Path(str(found)))]
        path = _place(folder, where, files, *_closed_over(do))
        if not (files and path.exists()):
            do_apart(do, where=where, found=found)
            _keep(path, b"")

    return read_once


def _place(folder: Path, *asked: object) -> Path:
    return folder / hashlib.sha256(pickle.dumps(asked)).hexdigest()


def _keep(path: Path, answer: bytes) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(answer)
    new.replace(path)


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    """Give the files beside a file, or of a folder, each with its size and when it was written."""
    folder = path if path.is_dir() else path.parent
    for file in sorted(folder.iterdir()) if path.exists() else ():
        stat = file.stat()
        yield str(file), stat.st_size, stat.st_mtime_ns


def _closed_over(function: Callable[..., object]) -> Iterator[str]:
    """Give what a function knows of its surroundings, and the functions among it: configs and names."""
    for name, value in sorted(inspect.getclosurevars(function).nonlocals.items()):
        if isinstance(value, FunctionType):
            yield from _closed_over(value)
        else:
            yield f"{name}={value!r}"


def _itself(value: Any) -> Any:
    return value


def _comparable(value: Any) -> Any:
    """Give what pickles alike in each process."""
    if isinstance(value, PreTrainedConfig):
        return type(value).__qualname__, value.name_or_path, value.to_json_string(use_diff=False)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _comparable(one) for name, one in value.items()}
    return [*map(_comparable, value)] if isinstance(value, list | tuple) else value
