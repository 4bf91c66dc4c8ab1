"""What a run needs of this machine, found without torch: processes, environment, files, packages, connections.

`Run` asks again, for programs that did not ask before their imports.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hfdist.config.batch import BatchPlan, plan_batch
from hfdist.config.checks.budgets import check_budgets
from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.data import SourceConfig, SourceKind
from hfdist.config.paths import expand_user
from hfdist.config.run import TRACKERS, RunConfig
from hfdist.config.strategy import Sharding
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError, nearest
from hfdist.messages.message import MOST_BYTES, NotAMessageError, read_json
from hfdist.records.run_folder import RunFolder
from hfdist.topology import Topology

_SUFFIXES = re.compile(r"(\.(jsonl?|ndjson|csv|tsv|txt|md|parquet|arrow|feather|ya?ml|gz|zst|bz2|xz|gguf))+$")
_OF_MODELS = ("config.json", "model/config.json")
"""What a model's folder has, and that of a run with a model in it."""
OFFLINE_FLAG = "--offline"
_LOCAL_TRACKERS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": (),
    "trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    "mlflow": ("MLFLOW_TRACKING_URI",),
}
"""They write to a folder, but where one of these variables names another machine."""
_OTHER_LAYOUTS = {
    "ACCELERATE_USE_FSDP": "strategy=fsdp2",
    "ACCELERATE_USE_MEGATRON_LM": "strategy=pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "strategy=pipeline",
    "ACCELERATE_USE_SAGEMAKER": None,
}


def check_run(config: RunConfig, *, world_size: int | None = None) -> tuple[Topology, BatchPlan]:
    """Check what can be checked before anything large is imported; ConfigError: the first mistake.

    `world_size` processes are to be started; None: as many as the launcher says.
    Gives this process's place (rank 0's where `world_size` is given), and the batch arithmetic.
    """
    _check_environment(config, os.environ)
    topology, batch = plan_run(config, world_size=world_size)
    for key, source in _sources(config).items():
        _check_source(f"{key}.path", source)
    system = config.data.chat.system
    if system is not None and os.path.isfile(os.path.expanduser(system)):
        what, allowed = "this is the name of a file", "the text of the system message, such as that of the file"
        raise ConfigError(what, where="data.chat.system", found=system, allowed=allowed)
    check_model_paths(config)
    _check_resume(config.checkpoint.resume)
    _check_writable("run.dir", config.run.dir)
    _check_trackers(config.report.to)
    check_budgets(config)
    _check_packages(config)
    return topology, batch


def _check_packages(config: RunConfig) -> None:
    """Check that the package is installed of each value that needs one besides hfdist's own."""
    precision, generators = config.train.precision, config.task.generators
    liger = "train.arguments.use_liger_kernel"
    needs = [
        (precision is Precision.fp8, "train.precision", precision.value, "torchao", "'torchao>=0.18,<0.19'", "bf16"),
        (bool(config.train.arguments.get("use_liger_kernel")), liger, "true", "liger_kernel", "liger-kernel", "false"),
        (generators > 0, "task.generators", generators, "zmq", "'pyzmq>=26'", "0"),
    ]
    for is_needed, key, value, module, package, instead in needs:
        if is_needed and importlib.util.find_spec(module) is None:
            raise ConfigError(
                "this value needs a package that is not installed",
                where=key,
                found=f"{value}, without {module}",
                hint=f"pip install {package}, or {key}={instead}",
            )


def check_model_paths(config: RunConfig) -> None:
    """Raise a ConfigError where the model, its tokenizer, an adapter or a reward model is a path that leads nowhere."""
    for key, name in (("model.name", config.model.name), ("model.tokenizer.name", config.model.tokenizer.name)):
        if name is None or os.path.exists(os.path.expanduser(name)):
            continue
        # An id of the Hub has one slash at the most.
        if _is_local(name) or name.count("/") > 1:
            what, allowed = "there is no such folder", "a Hub id, a folder, or a .gguf file"
            raise ConfigError(what, where=key, found=name, allowed=allowed, hint=_near(key, name))
    name = config.model.name or ""
    if os.path.isfile(os.path.expanduser(name)) and not name.endswith(".gguf"):
        what, folder = "a model is a folder, with its config.json", os.path.dirname(name) or "."
        hint = f"model={folder}" if os.path.isfile(os.path.join(os.path.expanduser(folder), "config.json")) else None
        raise ConfigError(what, where="model.name", found=name, allowed="a Hub id, a folder, a .gguf file", hint=hint)
    _check_no_adapter(name)
    is_model, holds_model = (os.path.isfile(os.path.expanduser(f"{name}/{file}")) for file in _OF_MODELS)
    if name and holds_model and not is_model:
        what, hint = "this is the folder of a run; its model is in it", f"model={name.rstrip('/')}/model"
        raise ConfigError(what, where="model.name", found=name, hint=hint)
    _check_adapter_path(config.adapter.path)
    key, path = "task.reward_model", config.task.reward_model
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        what, allowed = "there is no such folder", "the folder of a reward model"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint=_near(key, path))


def _check_no_adapter(name: str) -> None:
    """Refuse the folder of an adapter as the model: its base would be trained without it."""
    path = expand_user(name) / "adapter_config.json"
    if not name or not path.is_file() or path.with_name("config.json").is_file():
        return
    base = None
    with contextlib.suppress(OSError, NotAMessageError):
        with path.open("rb") as file:
            found = read_json(file.read(MOST_BYTES + 1))
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    what = "this is the folder of an adapter, and no model"
    # It may be anybody's text.
    is_name = isinstance(base, str) and re.fullmatch(r"[\w./~-]+", base, re.ASCII)
    hint = f"model={base if is_name else 'ID'} {shlex.quote(f'adapter.path={name}')}"
    raise ConfigError(what, where="model.name", found=name, hint=hint)


def _check_adapter_path(path: str | None) -> None:
    if path is None or not (_is_local(path) or path.count("/") > 1 or os.path.isdir(path)):
        return
    key, full = "adapter.path", expand_user(path)
    if not (full / "adapter_config.json").is_file():
        what = "the folder has no adapter" if full.is_dir() else "there is no such folder"
        allowed = "a folder with adapter_config.json, or a Hub id"
        hint = f"model={path}, without an adapter.path" if (full / "config.json").is_file() else _near(key, path)
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint=hint)


def _check_resume(path: str) -> None:
    steps = sorted(glob.glob(f"{glob.escape(path)}/checkpoints/step-*"))
    if steps:
        what, key = "this is the folder of a run, and not one of its checkpoints", "checkpoint.resume"
        allowed = "auto, never, or the folder of a checkpoint"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint=f"{key}={steps[-1]}")
    if os.path.isfile(os.path.join(path, "config.json")) and not os.path.isfile(os.path.join(path, "manifest.json")):
        what, hint = "this is the folder of a model, and no checkpoint", f"checkpoint.resume=auto model={path}"
        raise ConfigError(what, where="checkpoint.resume", found=path, hint=hint)


def plan_run(config: RunConfig, *, world_size: int | None = None) -> tuple[Topology, BatchPlan]:
    """Give this process's place and batch arithmetic; ConfigError: sizes that do not divide, or too few processes."""
    topology = config.strategy.topology(world_size)
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_size=topology.data,
        sequence_length=config.data.sequence_length,
        lanes=config.data.lanes,
        islands=config.islands.shares,
    )
    return topology, batch


def check_offline(config: RunConfig) -> None:
    """Raise a ConfigError on what needs a connection; the Hub's cache is asked where it is opened."""
    for key, source in _sources(config).items():
        path = source.path or ""
        if scheme_of(path) not in (None, "file", "memory"):
            what = f"the data lie on a network, which {OFFLINE_FLAG} rules out"
            allowed, hint = "a path on this machine", f"copy them here first, or leave {OFFLINE_FLAG} out"
            raise ConfigError(what, where=f"{key}.path", found=redact(path), allowed=allowed, hint=hint)
    for name in config.report.to:
        if name not in _LOCAL_TRACKERS:
            what = f"this tracker needs a connection, which {OFFLINE_FLAG} rules out"
            raise ConfigError(what, where="report.to", found=name, allowed=", ".join(_LOCAL_TRACKERS))
        for variable in _LOCAL_TRACKERS[name]:
            value = os.environ.get(variable, "")
            if value and not value.startswith(("file:", "sqlite:", "/", ".")):
                what = f"this tracker is told to report to another machine, which {OFFLINE_FLAG} rules out"
                found, hint = f"{variable}={redact(value)}", f"unset {variable}"
                raise ConfigError(what, where="report.to", found=found, hint=hint)
    if config.export.push_to is not None:
        what = f"an upload needs the Hub, which {OFFLINE_FLAG} rules out"
        hint = "export.push_to=null; the model's folder can be uploaded later with `hf upload`"
        raise ConfigError(what, where="export.push_to", found=config.export.push_to, hint=hint)


def _sources(config: RunConfig) -> dict[str, SourceConfig]:
    """Give all sources, those of the training and the held-out ones, by their keys."""
    sections = {"data.sources": config.data.sources, "data.eval_sources": config.data.eval_sources}
    return {f"{key}.{name}": source for key, sources in sections.items() for name, source in sources.items()}


def _check_environment(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Refuse variables of accelerate against the config: accelerate would follow them without a word, or half."""
    sharding, train = config.strategy.sharding, config.train

    def refuse(name: str, key: str, value: object, hint: str | None, *, helps: bool = True) -> None:
        """Raise a ConfigError; `helps`: whether the override `hint` makes the config what the variable says."""
        advice = f"unset {name}, or leave it out of the launcher's config file"
        what = "a variable of accelerate contradicts the config"
        found = f"{name}={environment[name]}, with {key}={value}"
        if hint is not None:
            instead = f"unset {name}, and give {hint} for that layout; a launcher's config file sets it, too"
            advice = f"{hint}, or {advice}" if helps else instead
        raise ConfigError(what, where=f"{name} (environment)", found=found, hint=advice)

    def is_true(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on", "t", "y")

    for name, hint in _OTHER_LAYOUTS.items():
        if is_true(name):
            refuse(name, "strategy.sharding", sharding.value, hint, helps=False)
    if is_true("ACCELERATE_USE_CPU") and sharding.is_deepspeed:
        # With it, accelerate prepares no DeepSpeed engine.
        refuse("ACCELERATE_USE_CPU", "strategy.sharding", sharding.value, None)
    if is_true("ACCELERATE_USE_DEEPSPEED") and not sharding.is_deepspeed:
        refuse("ACCELERATE_USE_DEEPSPEED", "strategy.sharding", sharding.value, None)
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage is not None and f"zero{stage}" != sharding.value:
        hint = f"strategy=zero{stage}" if f"zero{stage}" in Sharding.__members__ else None
        refuse("ACCELERATE_DEEPSPEED_ZERO_STAGE", "strategy.sharding", sharding.value, hint)
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() != "none":
        refuse("ACCELERATE_DEEPSPEED_CONFIG_FILE", "strategy.deepspeed", config.strategy.deepspeed, None)
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", train.precision.value, "bf16" if train.precision.is_bf16 else "no"):
        hint = f"train.precision={precision}" if precision in Precision.__members__ else None
        refuse("ACCELERATE_MIXED_PRECISION", "train.precision", train.precision.value, hint)
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no" and train.compile is not Compile.model:
        refuse("ACCELERATE_DYNAMO_BACKEND", "train.compile", train.compile.value, "train.compile=model")


def _check_source(key: str, source: SourceConfig) -> None:
    path = source.path
    if path is None or scheme_of(path) is not None:
        return
    full = os.path.expanduser(path)
    if source.kind is SourceKind.hub and os.path.isfile(full):
        what, allowed = "this is a file, and no dataset of the Hub", "OWNER/NAME"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint=f"data={path}, in place of data=hub")
    if source.kind is SourceKind.hub and not _is_local(path):
        return
    # What a glob finds in all folders below, `data/` finds out: links may lead round in them.
    start = full.partition("**")[0] or "."
    if not os.path.lexists(full) and not any(glob.iglob(start)):
        allowed = "a file, a folder, or a glob (quote it)" if source.kind is SourceKind.files else "a folder"
        raise ConfigError("no file is there", where=key, found=path, allowed=allowed, hint=_near(key, path))
    if source.kind is SourceKind.tokens and os.path.isfile(full):
        what, allowed = "token files are a folder", "a folder that hfdist pretokenize has written"
        raise ConfigError(what, where=key, found=path, allowed=allowed, hint="data=FILE for a file of text")
    if source.kind is SourceKind.files and RunFolder(Path(full)).record.is_file():
        what, hint = "this is the folder of a run, and not one of data", f"data=FILE; its model is model={path}/model"
        raise ConfigError(what, where=key, found=path, hint=hint)
    if source.kind is SourceKind.files and os.path.isfile(os.path.join(full, "00000.tokens")):
        what, hint = "this is a folder of token files", f"data=tokens data.sources.tokens.path={path}"
        hint += f" model.tokenizer.name={path.rstrip('/')}/tokenizer, in place of it"
        raise ConfigError(what, where=key, found=path, hint=hint)


def _is_local(name: str) -> bool:
    """Whether a name is a path, and no Hub id."""
    return name.startswith((".", "/", "~"))


def mixture_hint(files: Iterable[str]) -> str:
    """Say how several files are given, of which each is to be read."""
    quoted = (json.dumps(file) if re.search(r"[^\w./-]", file) else file for file in files)
    sources = (shlex.quote(f"+data.sources.part{number}={{path: {file}}}") for number, file in enumerate(quoted, 1))
    return f"data=mixture {' '.join(sources)}, or a folder or a glob that holds them"


def _near(key: str, path: str) -> str | None:
    """Give what is in the same folder under a similar name; of several files with commas, how they are given."""
    files = [part.strip() for part in path.strip("[]").split(",")]
    if key.startswith("data.") and len(files) > 1 and all(os.path.lexists(os.path.expanduser(file)) for file in files):
        return mixture_hint(files)
    if key == "data.sources.files.path" and re.fullmatch(r"[\w-][\w.-]*/[\w-]+", path):
        return f"data=hub data.sources.hub.path={path}"
    full = expand_user(path)
    try:
        names = [other.name for other in full.parent.iterdir()]
    except OSError:
        return None
    # A common suffix makes no names alike.
    by_stem = {_SUFFIXES.sub("", name): name for name in names if name != full.name}
    near = nearest(_SUFFIXES.sub("", full.name), by_stem, cutoff=0.75)
    return None if near is None else f"{key}={Path(path).with_name(by_stem[near])}"


def _check_writable(key: str, folder: str) -> None:
    """Make a folder in the first part of the path that is there: permissions alone do not tell, as of root in /proc."""
    path = Path(folder).absolute()
    there = next(part for part in (path, *path.parents) if os.path.lexists(part))
    try:
        with tempfile.TemporaryDirectory(prefix=".hfdist-", dir=there):
            pass
    except OSError as error:
        reason = f"the folder cannot be used: {error.strerror}"
        what = reason if os.path.isdir(there) else "a file is in the folder's place"
        allowed, hint = "a writable folder", "run.dir=runs/first"
        raise ConfigError(what, where=key, found=folder, allowed=allowed, hint=hint) from error


def _check_trackers(names: list[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            what, allowed = "transformers has no such tracker", ", ".join(sorted(TRACKERS))
            hint = nearest(name, TRACKERS, "report.to=[{}]") or "report.to=[]"
            raise ConfigError(what, where="report.to", found=name, allowed=allowed, hint=hint)
        modules = TRACKERS[name]
        if all(importlib.util.find_spec(module) is None for module in modules):
            what, hint = "the tracker's package is not installed", f"report.to=[], or pip install {modules[0]}"
            raise ConfigError(what, where="report.to", found=name, hint=hint)
