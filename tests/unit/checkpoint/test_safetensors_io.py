"""safetensors by hand: the format's own library reads what we write, and nonsense is refused without a traceback."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES
from hfdist.checkpoint.save_plan import WriteItem
from hfdist.checkpoint.save_planner import TensorSpec
from hfdist.checkpoint.shard_writer import write_shard
from hfdist.errors import CheckpointError


def random_tensor(dtype, shape):
    return torch.randint(0, 2, shape).to(dtype)


def write(path, tensors):
    specs = {
        name: TensorSpec(
            name=name, key="weight", shape=tuple(t.shape), dtype=DTYPE_NAMES[t.dtype], itemsize_bytes=t.element_size()
        )
        for name, t in tensors.items()
    }
    plan = safetensors_io.plan_file(specs)
    safetensors_io.create(path, plan)
    slots = [
        WriteItem(
            id=(name, "weight"),
            file=path.name,
            begin=plan.begins[name],
            end=plan.begins[name] + tensor.nbytes,
            is_trained=False,
            piece=number,
            elements_of_piece=slice(0, tensor.numel()),
        )
        for number, (name, tensor) in enumerate(tensors.items())
    ]
    write_shard(path.parent, slots, [tensor.reshape(-1) for tensor in tensors.values()])


def test_the_format_s_own_library_reads_every_type(tmp_path):
    tensors = {str(dtype): random_tensor(dtype, (3, 5)) for dtype in DTYPE_NAMES} | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "naïve/näme": torch.ones(1),
    }
    write(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].float(), tensor.float())


def test_ranges_are_read_and_cast(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "COPY_BYTES", 64)
    values = torch.arange(1000, dtype=torch.bfloat16)
    save_file({"x": values}, tmp_path / "x.safetensors")
    entry = safetensors_io.read_header(tmp_path / "x.safetensors")["x"]
    out = torch.zeros(300)
    with (tmp_path / "x.safetensors").open("rb") as file:
        safetensors_io.read_elements(file.fileno(), entry.begin + 2 * 500, entry.dtype, out)
    assert torch.equal(out, values[500:800].float())


def tampered(path, change):
    """Rewrite the header of a good file."""
    save_file({"x": torch.zeros(4), "y": torch.zeros(2)}, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


CHANGES = {
    "type": lambda h: h["x"].update(dtype="F33"),
    "shape": lambda h: h["x"].update(shape=[5]),
    "negative": lambda h: h["x"].update(shape=[-4], data_offsets=[16, 0]),
    "fraction": lambda h: h["x"].update(shape=[4.0]),
    "boolean": lambda h: h["x"].update(shape=[4, True]),
    "overlap": lambda h: h["y"].update(data_offsets=[8, 16]),
    "beyond": lambda h: h["y"].update(data_offsets=[10**12, 10**12 + 8]),
    "missing": lambda h: h["x"].pop("shape"),
    "left out": lambda h: h.pop("y"),
    "not a dict": lambda h: h.update(x=3),
    "huge": lambda h: h["x"].update(shape=[2**40, 2**40]),
    "too few offsets": lambda h: h["x"].update(data_offsets=[0]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tampered_headers_are_refused(tmp_path, name):
    tampered(tmp_path / "x.safetensors", CHANGES[name])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        safetensors_io.read_header(tmp_path / "x.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 80))
def test_any_bytes_are_refused(tmp_path_factory, content, length):
    path = tmp_path_factory.mktemp("bytes") / "x"
    path.write_bytes(length.to_bytes(8, "little") + content)
    try:
        entries = safetensors_io.read_header(path)
    except CheckpointError:
        return
    assert entries == {}


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(path)
    path.write_bytes((3).to_bytes(8, "little") + b"[1]")
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(path)


def test_deep_nesting_is_refused(tmp_path):
    path = tmp_path / "x"
    text = b"[" * 200_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(path)
