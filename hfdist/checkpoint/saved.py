"""The content of a checkpoint except its tensors: where each tensor lies, all single numbers, and the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.lanes_file import read_lanes
from hfdist.checkpoint.manifest import FORMATS, DamagedError, FormatError, Manifest, inside, read_json, read_manifest
from hfdist.checkpoint.piece import NUMBER, STEP, WEIGHT
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, Entry, TensorId
from hfdist.checkpoint.save_plan import ADAPTER_STEM, INDEX_FILE, MODEL_STEM, OPTIMIZER_STEM, STATE_FILE
from hfdist.units import list_first
from hfdist.whole_numbers import whole_number


class Saved(NamedTuple):
    """The content of a checkpoint except its tensors."""

    entries: dict[TensorId, Entry]
    """Where each tensor lies, by parameter and key."""
    numbers: dict[TensorId, float]
    """Step counts and other single numbers of the optimizer, by parameter and key."""
    state: dict[str, Any]
    """State of the training besides tensors, as JSON."""

    def to_json(self, path: Path) -> list[object]:
        """Give JSON by which a rank that has opened the checkpoint `path` tells the others."""
        entries = [
            [tensor_id, entry.path.relative_to(path).as_posix(), DTYPE_NAMES[entry.dtype], entry.shape, entry.begin]
            for tensor_id, entry in self.entries.items()
        ]
        return [entries, list(self.numbers.items()), self.state]

    @classmethod
    def from_json(cls, path: Path, values: list[Any]) -> Saved:
        """Make the content of what `to_json` gives; `path`: the checkpoint, as this rank sees it."""
        entries_as_json, numbers_as_json, state = values
        entries = {
            (name, key): Entry(path / file, DTYPES[dtype], tuple(shape), begin)
            for (name, key), file, dtype, shape, begin in entries_as_json
        }
        numbers = {(name, key): value for (name, key), value in numbers_as_json}
        return cls(entries, numbers, state)


def open_saved(path: Path, manifest: Manifest) -> Saved:
    """Read the content of a checkpoint except its tensors, in this process.

    Raises:
        CheckpointError: it is damaged, or of another version of the format.
    """
    numbers, state = _read_state(path, manifest)
    entries = {(name, WEIGHT): entry for name, entry in _model_entries(path, manifest).items()}
    for file_name in manifest.files:
        if file_name.startswith(f"{OPTIMIZER_STEM}-"):
            for name, entry in safetensors_io.read_header(inside(path, file_name)).items():
                # The optimizer's tensors are named PARAMETER/KEY.
                parameter, _, key = name.rpartition("/")
                entries[parameter, key] = entry
    return Saved(entries, numbers, state)


def read_state(path: Path) -> dict[str, Any]:
    """Read only the `state` of a checkpoint, in this process; CheckpointError: it is damaged."""
    _, state = _read_state(path, read_manifest(path))
    return state


def check_readable(path: Path) -> Manifest:
    """Read all of a checkpoint except its tensors, as a resume does, and give its manifest.

    Raises:
        CheckpointError: something cannot be read.
    """
    manifest = read_manifest(path)
    open_saved(path, manifest)
    read_lanes(path, manifest)
    return manifest


def _read_state(path: Path, manifest: Manifest) -> tuple[dict[TensorId, float], dict[str, object]]:
    """Read the single numbers by parameter and key, and the state."""
    content = read_json(_listed(path, manifest, STATE_FILE))
    try:
        numbers: dict[TensorId, float] = {
            (str(name), STEP): whole_number(step) for name, step in content["steps"].items()
        }
        for key, by_name in content.get("numbers", {}).items():
            numbers |= {(str(name), f"{NUMBER}{key}"): _number(value) for name, value in by_name.items()}
        state, version = dict(content["state"]), whole_number(content["format"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError("state", "the training state is damaged", where=path / STATE_FILE, found=error) from error
    if version not in FORMATS:
        raise FormatError(version, where=path)
    return numbers, state


def _number(value: object) -> float:
    """Give a value that is a number; TypeError: it is none."""
    if not isinstance(value, int | float):
        raise TypeError(f"not a number: {str(value)[:40]}")
    return value


def _model_entries(path: Path, manifest: Manifest) -> dict[str, Entry]:
    """Say where each weight lies, by name: in one file, of a model or an adapter, or in those that an index names."""
    if INDEX_FILE not in manifest.files:
        is_adapter = f"{ADAPTER_STEM}.safetensors" in manifest.files
        stem = ADAPTER_STEM if is_adapter else MODEL_STEM
        return safetensors_io.read_header(_listed(path, manifest, f"{stem}.safetensors"))
    index = read_json(_listed(path, manifest, INDEX_FILE))
    try:
        weight_map = {str(name): str(file_name) for name, file_name in index["weight_map"].items()}
        if not weight_map:
            raise ValueError("it names no weights")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError("index", "the index of the weights is damaged", where=path / INDEX_FILE) from error
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(weight_map.values())):
        entries |= safetensors_io.read_header(_listed(path, manifest, file_name))
    # Each weight must be in the file that the index says, and none in another one.
    found = {(name, entry.path) for name, entry in entries.items()}
    expected = {(name, path / file_name) for name, file_name in weight_map.items()}
    wrong = found ^ expected
    if wrong:
        names = list_first(sorted({name for name, _ in wrong}))
        what = "the index does not fit the files of weights"
        raise DamagedError("index", what, where=path / INDEX_FILE, found=names)
    return entries


def _listed(path: Path, manifest: Manifest, name: str) -> Path:
    """Give the path of a file; DamagedError: the manifest does not list it, so that nobody has checked it."""
    checked = inside(path, name)
    if name not in manifest.files:
        raise DamagedError("unlisted", "a file that the manifest does not list", where=path, found=name)
    return checked
