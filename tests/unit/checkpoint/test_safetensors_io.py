"""safetensors by hand: the format's own library reads what we write, and nonsense is refused without a traceback."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.piece import WEIGHT
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES
from hfdist.errors import CheckpointError
from tests.unit.checkpoint.pieces import save, whole


def test_the_format_s_own_library_reads_every_type(tmp_path):
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPE_NAMES} | {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "naïve/näme": torch.ones(1),
    }
    path = save(tmp_path, 1, [whole(name, WEIGHT, tensor) for name, tensor in tensors.items()])
    loaded = load_file(path / "model.safetensors")
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


@pytest.mark.parametrize(
    "content", [b"", (3).to_bytes(8, "little") + b"[1]", (200_000).to_bytes(8, "little") + b"[" * 200_000]
)
def test_what_is_no_header_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(tmp_path / "x")


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with pytest.raises(CheckpointError):
        safetensors_io.read_header(tmp_path / "x")
