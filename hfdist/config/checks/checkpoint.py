"""Checks `checkpoint.*`."""

from __future__ import annotations

import os
from pathlib import Path

from hfdist.config.checks.conflict import conflict
from hfdist.config.checks.urls import check_address, redact, scheme_of, without_query
from hfdist.config.override_text import in_shell
from hfdist.config.run import RunConfig
from hfdist.config.schema import OFF
from hfdist.errors import ConfigError, nearest

_WORDS = ("auto", "never")
"""Values of checkpoint.resume that are no paths."""
_MIRRORS = ("s3", "gs", "hf", "file")
"""Schemes of stores that can be written, and that are there after the process."""


def check_checkpoints(config: RunConfig) -> None:
    """Raise a ConfigError on saves that come at no step, on what needs saves, and on a start that is not there."""
    if config.checkpoint.every is not None:
        _check_kept(config, config.checkpoint.every)
    if config.checkpoint.replicate_every is not None:
        _check_replicas(config)
    if config.checkpoint.mirror is not None:
        _check_mirror(config, config.checkpoint.mirror)
    if config.checkpoint.resume not in _WORDS:
        _check_resume(config)


def _check_kept(config: RunConfig, every: int) -> None:
    keep_every, eval_every = config.checkpoint.keep_every, config.train.eval_every
    if keep_every is not None and keep_every % every != 0:
        what = "most of the steps to keep are not saved"
        allowed = "a multiple of checkpoint.every, or null"
        hint = f"checkpoint.keep_every={-(-keep_every // every) * every}"
        raise conflict(config, "checkpoint.keep_every checkpoint.every", what, allowed=allowed, hint=hint)
    if config.checkpoint.keep_best and (eval_every is None or every % eval_every != 0):
        what = "not every checkpoint is evaluated, so the best is not known"
        allowed = "true where train.eval_every divides checkpoint.every, or false"
        # Save as often as the run evaluates, unless this misses steps of `keep_every`.
        is_missed = eval_every is None or (keep_every is not None and keep_every % eval_every != 0)
        more_evaluations = f"train.eval_every={every}"
        hint = more_evaluations if is_missed else f"checkpoint.every={eval_every}, or {more_evaluations}"
        raise conflict(config, "checkpoint.keep_best train.eval_every", what, allowed=allowed, hint=hint)


def _check_mirror(config: RunConfig, address: str) -> None:
    key, scheme = "checkpoint.mirror", scheme_of(address)
    allowed = f"null, or {', '.join(f'{known}://...' for known in _MIRRORS)}"
    if config.checkpoint.every is None:
        what, hint = "a mirror gets what a run saves, and this run saves nothing", "checkpoint.every=100"
        raise conflict(config, f"{key} checkpoint.every", what, hint=f"{hint}, or {key}=null")
    if scheme is None:
        what = "a mirror is an address, and this is a path"
        raise conflict(config, key, what, allowed=allowed, hint=in_shell(key, _address_of(address or ".")))
    if scheme not in _MIRRORS:
        what, hint = "nothing can be stored at such an address", f"{key}=s3://BUCKET/runs"
        raise ConfigError(what, where=key, found=redact(address), allowed=allowed, hint=hint)
    if without_query(address) != address or redact(address) != address:
        what, hint = "the address of a mirror has neither a user nor a query", in_shell(key, redact(address))
        raise ConfigError(what, where=key, found=redact(address), hint=hint)
    if not address.startswith(f"{scheme}://"):
        what, hint = "the scheme of a mirror has small letters", in_shell(key, scheme + address[len(scheme) :])
        raise ConfigError(what, where=key, found=address, hint=hint)
    check_address(address, key=key)
    if scheme == "file":
        _check_mirror_folder(config, address.removeprefix("file://"))


def _check_mirror_folder(config: RunConfig, path: str) -> None:
    """Refuse a mirror that depends on where the run is started, or that shares a folder with the run."""
    key = "checkpoint.mirror"
    if not path.startswith("/"):
        what, hint = "the path of a mirror is not absolute", in_shell(key, _address_of(path or "."))
        raise conflict(config, key, what, allowed="file:///...", hint=hint)
    # Not by pathlib: it raises for a circle of links.
    own = Path(os.path.realpath(os.path.join(path, config.run.name)))
    folder = Path(os.path.realpath(config.run.dir))
    if own.is_relative_to(folder) or folder.is_relative_to(own):
        what = "the mirror and the run's folder are not apart"
        hint = f"{key}=file:///mnt/backup/runs, or an address of another machine"
        raise conflict(config, f"{key} run.dir", what, allowed="neither lies in the other", hint=hint)


def _address_of(path: str) -> str:
    # As fsspec reads it: nothing is quoted.
    return f"file://{os.path.abspath(os.path.expanduser(path))}"


def _check_resume(config: RunConfig) -> None:
    """Check a path: it is the folder of a checkpoint, if there is one."""
    path, key = config.checkpoint.resume, "checkpoint.resume"
    if scheme_of(path) is not None:
        what = "a run goes on from a mirror by its own keys, and not by the address of a checkpoint"
        hint = f"{key}=auto {in_shell('checkpoint.mirror', redact(path))}, where run.name is the folder below it"
        raise ConfigError(what, where=key, found=redact(path), hint=hint)
    folder = Path(path)
    for holder, what in (
        (folder / "checkpoints", "this is the folder of a run, and not one of its checkpoints"),
        (folder, "this folder holds checkpoints, but it is not a checkpoint"),
    ):
        if path and (steps := _checkpoints_in(holder)):
            hint = in_shell(key, steps[-1])
            raise conflict(config, key, what, allowed="auto, never, or the folder of one of them", hint=hint)
    # Not by pathlib: Python 3.11 raises for a folder without permission, and for a name that is too long.
    if path and os.path.isfile(folder / "config.json") and not os.path.isfile(folder / "manifest.json"):
        what, hint = "this is the folder of a model, and no checkpoint", f"{key}=auto {in_shell('model', path)}"
        raise conflict(config, key, what, hint=hint)
    if path and os.path.isdir(folder):
        return
    near, beside = nearest(path.lower(), _WORDS, f"{key}={{}}"), _checkpoints_in(folder.parent)
    word = "never" if path.lower() in OFF else "auto"
    hint = near or in_shell(key, beside[-1] if beside else word)
    what = "this is neither auto, nor never, nor a folder that exists"
    allowed = f"{', '.join(_WORDS)}, or the folder of a checkpoint"
    raise conflict(config, key, what, allowed=allowed, hint=hint)


def _checkpoints_in(folder: Path) -> list[str]:
    """Give the checkpoints of a folder, the newest last; one that was not finished has a suffix."""
    try:
        return sorted(str(path) for path in folder.glob("step-*") if not path.suffix)
    except OSError:
        return []


def _check_replicas(config: RunConfig) -> None:
    if config.checkpoint.every is None:
        what = "replicas are made between saves, and this run saves nothing"
        hint = "checkpoint.every=100, or checkpoint.replicate_every=null"
        raise conflict(config, "checkpoint.replicate_every checkpoint.every", what, hint=hint)
    folder = config.checkpoint.replicate_dir
    if not os.access(folder, os.W_OK | os.X_OK) or not os.path.isdir(folder):
        what = "replicas need a folder in memory that can be written"
        hint = "checkpoint.replicate_every=null, or another folder, such as a mounted tmpfs"
        raise conflict(config, "checkpoint.replicate_dir", what, allowed="a folder of every machine", hint=hint)
