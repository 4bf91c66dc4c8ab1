"""Devices by name: their files, torch's names of them, files of the user's own, and a machine that is measured."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hfdist.config.composition.compose import compose_config
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.hardware import CPU, match_device, read_hardware
from hfdist.config.plan import compose_plan
from hfdist.config.train import Precision
from hfdist.errors import ConfigError
from hfdist.planning import machines
from hfdist.planning.timing.hardware import find_hardware
from hfdist.run.own_plan import begin_plan
from hfdist.topology import Topology

SHIPPED = list_options(shipped_folder(), "hardware")


@pytest.fixture(scope="module")
def shipped():
    return {name: read_hardware(name) for name in SHIPPED}


def test_every_file_is_plausible(shipped):
    for name, hardware in shipped.items():
        tflops = hardware.tflops
        halves = [peak for peak in (tflops.bf16, tflops.fp16) if peak is not None]
        assert hardware.devices, name
        assert 10 < hardware.memory_gib < 300, name
        assert all(tflops.fp32 < half for half in halves), name
        assert halves, name
        assert tflops.fp8 is None or tflops.fp8 == pytest.approx(2 * max(halves), rel=0.02), name
        # Operations for each byte: a peak or a bandwidth that is off by ten would stand out.
        assert 30 < hardware.half_flops / hardware.bytes_per_second < 450, name
        assert hardware.network_gb_per_second <= hardware.link_gb_per_second < hardware.memory_gb_per_second, name
        assert 50 < hardware.watts < 1500, name
        assert hardware.price_per_hour is None, name


def test_no_two_files_have_the_same_name(shipped):
    names = [frozenset(device.upper().split()) for hardware in shipped.values() for device in hardware.devices]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_80gb"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb_pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100_40gb_pcie"),
        ("Tesla V100-SXM2-32GB", "v100_32gb"),
        ("NVIDIA GeForce RTX 4090 D", "rtx_4090_d"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA Graphics Device", None),
    ],
)
def test_torchs_names_have_their_files(device, name):
    found = match_device(device)
    assert (found and found.name) == name


def test_a_peak_is_that_of_the_precision(shipped):
    h100, v100 = shipped["h100_80gb"], shipped["v100"]
    assert h100.peak_flops(Precision.bf16) == 989e12
    assert h100.peak_flops(Precision.fp8) == 1979e12
    assert h100.peak_flops(Precision.fp32) == 67e12
    assert h100.peak_flops(Precision.fp32, uses_tf32=True) == 494e12
    # Without units for it bf16 is computed as float32 is.
    assert v100.peak_flops(Precision.bf16) == v100.peak_flops(Precision.fp32) == 15.7e12
    assert v100.half_flops == 125e12


def test_a_name_that_no_file_can_have_is_unknown():
    with pytest.raises(ConfigError, match="there is no such hardware"):
        read_hardware("a" * 300)


def test_a_number_that_no_float_holds_is_refused():
    with pytest.raises(ConfigError, match="does not fit"):
        compose_plan([f"plan.memory_gib={'1' * 400}"])


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError) as caught:
        find_hardware("h100_80")
    assert caught.value.where == "plan.hardware"
    assert caught.value.hint == "plan.hardware=h100_80gb"
    assert "mi300x" in caught.value.allowed
    assert "cpu" in caught.value.allowed


def test_a_file_of_ones_own(tmp_path):
    own = tmp_path / "hardware"
    own.mkdir()
    text = (shipped_folder() / "hardware" / "l4.yaml").read_text()
    (own / "edge.yaml").write_text(text.replace("[L4]", "[Edge 7]") + "price_per_hour: 0.5\n")
    by_path = find_hardware(str(own / "edge.yaml"))
    by_folder = find_hardware("edge", own=tmp_path)
    assert by_path == by_folder
    assert by_path.name == "edge"
    assert by_path.price_per_hour == 0.5
    assert match_device("Acme Edge 7", tmp_path).name == "edge"
    assert match_device("Acme Edge 7") is None


@pytest.mark.parametrize(
    ("line", "where", "words"),
    [
        ("memory_gib: lots", "hardware.memory_gib", "a number"),
        ("memory_gib: -3", "hardware.memory_gib", "> 0"),
        ("memory: 3", "hardware.memory ", "hardware.memory_gib"),
        ("tflops: {bf12: 3}", "hardware.tflops.bf12", "hardware.tflops.bf16"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, line, where, words):
    path = tmp_path / "own.yaml"
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        find_hardware(str(path))
    assert caught.value.where.startswith(where)
    assert words in f"{caught.value.allowed} {caught.value.hint}"


def test_a_gpu_that_no_file_describes_is_no_cpu(monkeypatch):
    """And a run on it has no plan of itself."""
    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total_memory=2**33)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    with pytest.raises(ConfigError) as caught:
        find_hardware()
    assert (caught.value.where, caught.value.found) == ("plan.hardware", device.name)
    config = compose_config(["model=tiny"])
    assert begin_plan(config, AutoConfig.for_model("llama", **config.model.config), Topology()) is None


def test_without_a_gpu_the_machine_is_measured(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the device at hand is a GPU")
    # Those who measure at once; links are measured by two, too.
    monkeypatch.setattr("hfdist.planning.timing.hardware._MOST_RANKS", 2)
    hardware = find_hardware(processes=1)
    assert hardware.is_cpu
    one = find_hardware("cpu", processes=64)
    # 64 processes share the cores, the memory and what crosses it.
    assert one.memory_bytes == pytest.approx(hardware.memory_bytes / 64)
    assert one.peak_flops(Precision.fp32) < hardware.peak_flops(Precision.fp32)
    assert all(math.isfinite(value) and value > 0 for value in (hardware.kernel_us, hardware.memory_gb_per_second))
    # Between a core of twenty years ago and a large one of today.
    assert 1e9 < hardware.peak_flops(Precision.fp32) < 1e13


def test_a_machine_is_measured_once_for_each_number_of_cores_that_a_job_has(tmp_path, monkeypatch):
    measured = []

    def measure(processes):
        measured.append(processes)
        return replace(read_hardware("l4"), devices_per_machine=processes)

    monkeypatch.setattr(machines, "measure_cpu", measure)
    for cores in (8, 8, 2):
        monkeypatch.setattr("hfdist.host_cores.os.sched_getaffinity", lambda _, cores=cores: range(cores))
        assert machines.measure_cpu_once(tmp_path, 4) == measure(4)
        measured.pop()
    assert measured == [4, 4]


def test_mfu_is_of_gpus_alone():
    v100 = read_hardware("v100")
    assert v100.mfu(0.5 * v100.half_flops) == 0.5
    assert replace(v100, devices=[CPU]).mfu(1e9) is None
