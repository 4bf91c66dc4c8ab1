"""Small named tensors as one process holds them."""

import json
import time

import torch

from hfdist.checkpoint import Saver
from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.manifest import MANIFEST, hash_of_content
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.checkpoint.regions import assign_writers, merge_specs, split_tensors


def whole(name, key, tensor):
    return Piece(name=name, key=key, shape=tuple(tensor.shape), start=0, view=tensor)


def plan_writes(declared):
    """Give what each rank writes, from the regions of each, as the ranks find it out together."""
    specs = merge_specs(region for regions in declared for region in regions)
    segments = split_tensors(specs, [(holder, region) for holder, regions in enumerate(declared) for region in regions])
    writes = []
    for own in range(len(declared)):
        shares = assign_writers([segment for segment in segments if own in segment.holders])
        writes.append([segment for writer, segment in shares if writer == own])
    return writes


def small_pieces(value=1.0):
    """Two parameters, the state of one, and a buffer of integers; every element differs."""
    return [
        whole("a", WEIGHT, value * torch.arange(12.0).view(3, 4)),
        whole("a", "exp_avg", value * torch.arange(12.0).view(3, 4) + 0.5),
        whole("a", STEP, torch.tensor(7.0 * value)),
        whole("b", WEIGHT, value * torch.arange(5, dtype=torch.bfloat16)),
        whole("count", WEIGHT, torch.tensor(int(value))),
    ]


def blank(pieces):
    """The same pieces with nothing in them."""
    return [
        Piece(name=p.name, key=p.key, shape=p.shape, start=p.start, view=torch.full_like(p.view, -1)) for p in pieces
    ]


def write_checkpoint(folder, *, step, pieces, state, write_model_files, names=None):
    """Write a checkpoint and wait for it. A collective."""
    path = folder / step_name(step)
    saver = Saver(in_background=False, names=names)
    saver.save(
        path,
        step=step,
        pieces=pieces,
        state=state,
        write_files=lambda folder, is_replica: write_model_files(folder),
        keep=None,
        begin_seconds=time.monotonic(),
    )
    return path


def save(folder, step, pieces=None, state=None, names=None):
    return write_checkpoint(
        folder,
        step=step,
        pieces=small_pieces(step) if pieces is None else pieces,
        state=state or {},
        write_model_files=lambda path: (path / "config.json").write_text("{}"),
        names=names,
    )


def edit_manifest(path, change):
    """Change what a manifest says, so that it agrees with itself."""
    content = json.loads((path / MANIFEST).read_text())
    del content["xxh128"]
    change(content)
    (path / MANIFEST).write_text(json.dumps(content | {"xxh128": hash_of_content(content)}))


def flip_a_bit(file):
    """Of its last byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def files_of(folder):
    """Contents by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
