"""What trackers have kept in a run folder, each read by its own package; wandb's file by its format, as it has none."""

import importlib.util
import json
import os
import struct
from pathlib import Path

from hfdist.testing import run_ranks

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]
# Before tests fork what uses it. trackio finds its folder when it is imported.
for package in (PACKAGES[name] for name in INSTALLED if name != "trackio"):
    importlib.import_module("torch.utils.tensorboard" if package == "tensorboard" else package)

# As the user of a machine without a network would set them.
QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def read_tracker(name, run_dir, project="hfdist"):
    """Give by run of the tracker `{"config": names of sections, figure: [(step, value), ...]}`, in the tracker's order.

    `project` is what the tracker files the runs under. In a process of its own: these packages keep settings, threads
    and servers for as long as the process lives.
    """
    return run_ranks(_READERS[name], 1, Path(run_dir).absolute(), project, group=False)[0]


def _tensorboard(run_dir, project):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    figures = {_plain(tag): [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    return {"": figures | {"config": [line[:-1] for line in text.splitlines() if line and line[0].isalpha()]}}


def _wandb(run_dir, project):
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    # In the order in which `wandb sync` sends those of one run.
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        names, rows = set(), []
        for content in _records(path.read_bytes()):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                assert record.run.project == project
                run = runs.setdefault(record.run.run_id, {"config": []})
                names.add(record.run.display_name)
                run["config"] += [item.key for item in record.run.config.update]
            elif record.WhichOneof("record_type") == "config":
                run["config"] += [item.key for item in record.config.update]
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
        assert names == {run_dir.name}
        _add_rows(run, rows)
    return runs


def _records(content):
    """The file is a log as LevelDB's: blocks of 32 KiB, records in parts, each with a checksum, a length and a kind."""
    at, parts = 7, []
    while at + 7 <= len(content):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def _trackio(run_dir, project):
    os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = {}
    for one in trackio.Api().runs(project):
        runs[one.name] = run = {"config": list(one.config)}
        _add_rows(run, SQLiteStorage.get_logs(project, one.name, run_id=one.id))
    return runs


def _mlflow(run_dir, project):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    client, runs = mlflow.MlflowClient((run_dir / "mlruns").as_uri()), {}
    for experiment in client.search_experiments(filter_string=f"name = '{project}'"):
        for one in client.search_runs([experiment.experiment_id]):
            assert one.info.run_name == run_dir.name
            # Written by several threads, in any order; it is shown by step.
            history = {key: client.get_metric_history(one.info.run_id, key) for key in one.data.metrics}
            runs[one.info.run_id] = {
                "config": [key.partition(".")[0] for key in one.data.params],
                "status": one.info.status,
            } | {key: sorted((point.step, point.value) for point in points) for key, points in history.items()}
    return runs


def _add_rows(run, rows):
    for row in rows:
        for key, value in row.items():
            run.setdefault(_plain(key), []).append((row["train/global_step"], value))


def _plain(key):
    """As hfdist calls the figure: transformers has `train/loss` and `eval/loss`."""
    kind, _, name = key.partition("/")
    return {"train": name, "eval": f"eval_{name}"}.get(kind, key)


_READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
