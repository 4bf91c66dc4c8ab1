"""Energy: counters that go round, devices without one, and each device and host counted once."""

import importlib.util
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hfdist.energy import (
    EnergySources,
    RankMeter,
    describe_sources,
    estimates,
    is_known,
    name_sources,
    num_devices,
    nvml,
)
from hfdist.energy.estimates import ProcessLoad
from hfdist.energy.meter import Source
from hfdist.energy.rapl import POWERCAP, Rapl

UUID = "GPU-8b086d4c-2529-417c-aba8-54d2cceac078"


class Nvml:
    """What nvidia-ml-py says of one device; None: this device does not support it."""

    class NVMLError(Exception):
        pass

    def __init__(self, millijoules, milliwatts):
        self.millijoules, self.milliwatts, self.is_up = millijoules, milliwatts, False

    def nvmlInit(self):
        self.is_up = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if not self.is_up or uuid != UUID:
            raise self.NVMLError("Not Found")
        return "a handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._of(handle, self.millijoules)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._of(handle, self.milliwatts)

    def _of(self, handle, value):
        if handle != "a handle" or value is None:
            raise self.NVMLError("Not Supported")
        return value


@pytest.fixture
def driver(monkeypatch):
    def make(millijoules=None, milliwatts=None):
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(millijoules, milliwatts))
        return sys.modules["pynvml"]

    return make


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = SimpleNamespace(seconds=100.0)
    for module in (nvml, estimates):
        monkeypatch.setattr(
            module, "time", SimpleNamespace(monotonic=lambda: now.seconds, process_time=time.process_time)
        )
    return now


def test_a_device_is_read_from_its_counter_in_millijoules(driver):
    device = driver(millijoules=5_000_000_000, milliwatts=300_000)
    meter = nvml.open_device(UUID)
    assert meter.joules() == 0
    device.millijoules += 2_500
    assert meter.joules() == 2.5
    # The driver was loaded anew, then counts on.
    device.millijoules = 1_000
    assert meter.joules() == 2.5
    device.millijoules = 2_000
    assert meter.joules() == 3.5
    # A device that falls off the bus.
    device.millijoules = None
    assert meter.joules() == 3.5


def test_without_a_counter_power_is_taken_over_time(driver, clock):
    device = driver(milliwatts=300_000)
    meter = nvml.open_device(UUID)
    assert meter.sample_seconds == 1.0
    clock.seconds += 2
    device.milliwatts = 100_000
    assert meter.joules() == 600
    clock.seconds += 1
    assert meter.joules() == 700


@pytest.mark.parametrize("uuid", [UUID, "GPU-another"])
def test_a_device_that_tells_nothing_has_no_meter(driver, uuid):
    driver()
    assert nvml.open_device(uuid) is None


def test_without_the_package_or_a_driver_there_is_no_meter(monkeypatch):
    if importlib.util.find_spec("pynvml") is not None:
        import pynvml

        # The names that are called, in the package itself; this machine may have a driver, but not this device.
        names = [name for name in vars(Nvml) if name.lower().startswith("nvml")]
        assert [name for name in names if not hasattr(pynvml, name)] == []
        assert nvml.open_device(UUID) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.open_device(UUID) is None


def zone(folder, number, name, microjoules, most=262_143_328_850):
    path = folder / f"intel-rapl:{number}"
    path.mkdir()
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", most)):
        (path / file).write_text(f"{value}\n")
    return path


@pytest.fixture
def powercap(tmp_path):
    zone(tmp_path, "0", "package-0", 262_143_000_000)
    zone(tmp_path, "0:0", "core", 77)
    zone(tmp_path, "0:1", "dram", 5_000_000, most=65_712_999_613)
    zone(tmp_path, "1", "psys", 88)
    return tmp_path


def add(powercap, number, microjoules):
    file = powercap / f"intel-rapl:{number}" / "energy_uj"
    file.write_text(str(int(file.read_text()) + microjoules))


def test_rapl_adds_packages_and_memory_and_goes_round(powercap):
    meter = Rapl(powercap)
    assert meter.joules() == 0
    for number in ("0:0", "1"):
        add(powercap, number, 1_000_000)
    assert meter.joules() == 0, "cores are a part of their package, and psys holds it"
    add(powercap, "0:1", 2_000_000)
    # 328,850 to the end of the range, then 671,150 more.
    (powercap / "intel-rapl:0" / "energy_uj").write_text("671150")
    assert meter.joules() == pytest.approx(3.0)
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    add(powercap, "0:1", 500_000)
    assert meter.joules() == pytest.approx(3.5)


def test_a_folder_without_readable_counters_is_no_meter(tmp_path, powercap):
    with pytest.raises(FileNotFoundError):
        Rapl(tmp_path / "none")
    (powercap / "intel-rapl:0" / "energy_uj").unlink()  # as root, rights say nothing
    with pytest.raises(OSError, match="energy_uj"):
        Rapl(powercap)
    assert RankMeter(powercap=powercap).sources.has_rapl is False


@pytest.mark.skipif(not any(POWERCAP.glob("intel-rapl:0")), reason="this machine shows no RAPL counters")
def test_rapl_of_this_machine():
    try:
        meter = Rapl()
    except PermissionError:
        pytest.skip("this user may not read RAPL")
    time.sleep(0.2)
    assert 0 < meter.joules() < 1000


def test_an_estimate_is_cpu_time_of_so_many_watts(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    by_default, given = ProcessLoad(None), ProcessLoad(400.0)
    begin = time.process_time()
    burn(0.1)
    assert by_default.joules() == pytest.approx(5 * (time.process_time() - begin), rel=0.3)
    assert given.joules() == pytest.approx(100 * (time.process_time() - begin), rel=0.3)


def burn(seconds, is_done=None, may_end=None):
    begin = time.process_time()
    while time.process_time() < begin + seconds:
        pass
    if is_done is not None:
        is_done.set()
        may_end.wait(60)


def test_an_estimate_counts_loader_processes_once():
    context = multiprocessing.get_context("fork")
    is_done, may_end = context.Event(), context.Event()
    meter = ProcessLoad(5.0 * os.cpu_count())
    loader = context.Process(target=burn, args=(0.3, is_done, may_end))
    loader.start()
    assert is_done.wait(60)
    alive = meter.joules()
    assert alive >= 1.4
    may_end.set()
    loader.join()
    assert alive - 0.1 <= meter.joules() < alive + 1


ON_CPU = EnergySources(host="a", has_rapl=False, device=None, device_source=None)
ON_GPU = EnergySources(host="a", has_rapl=True, device="GPU-0", device_source="nvml")


def test_two_ranks_of_a_host_count_its_device_and_its_counters_once(driver, powercap):
    device = driver(millijoules=0)
    meters = [RankMeter(UUID, powercap=powercap) for _ in range(2)]
    by_rank = [meter.sources for meter in meters]
    assert by_rank[0] == by_rank[1] == replace(ON_GPU, host=by_rank[0].host, device=UUID)
    for rank, meter in enumerate(meters):
        meter.begin(rank, by_rank)
    device.millijoules = 4_000
    add(powercap, "0:1", 1_000_000)
    assert [meter.joules() for meter in meters] == [5.0, 0.0]
    for meter in meters:
        meter.close()


def test_ranks_of_two_hosts_count_both(driver, powercap, tmp_path):
    device = driver(millijoules=0)
    first, second = RankMeter(UUID, powercap=powercap), RankMeter(UUID, powercap=tmp_path / "none", host_watts=1e-9)
    second.sources = replace(second.sources, host="another", device="GPU-1")
    for rank, meter in enumerate((first, second)):
        meter.begin(rank, [first.sources, second.sources])
    device.millijoules = 4_000
    add(powercap, "0:1", 1_000_000)
    assert first.joules() == 5.0
    assert second.joules() == pytest.approx(4.0, abs=1e-6)
    assert name_sources([first.sources, second.sources]) == "nvml+rapl+estimate"
    assert num_devices([first.sources, second.sources]) == 2
    first.close()


def test_a_device_without_a_meter_is_estimated_where_its_watts_are_given(clock, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    unknown = RankMeter(UUID, powercap=tmp_path).sources
    assert (unknown.device_source, is_known([unknown])) == (None, False)
    meter = RankMeter(UUID, device_watts=700, host_watts=1e-9, powercap=tmp_path)
    assert is_known([meter.sources])
    meter.begin(0, [meter.sources])
    clock.seconds += 10
    assert meter.joules() == pytest.approx(7000)


@pytest.mark.parametrize(
    ("by_rank", "name", "said", "devices"),
    [
        ([ON_CPU, ON_CPU], "estimate", "1 host estimated from CPU time at 5 W a core", 1),
        ([ON_GPU, replace(ON_GPU, device="GPU-1")], "nvml+rapl",
         "2 GPUs measured by NVML, 1 host measured by RAPL (processors and memory)", 2),
        ([ON_GPU, replace(ON_CPU, host="b")], "nvml+rapl+estimate",
         "1 GPU measured by NVML, 1 host measured by RAPL (processors and memory), "
         "1 host estimated from CPU time at 5 W a core", 1),
    ],
)  # fmt: skip
def test_what_is_counted_is_said(by_rank, name, said, devices):
    assert name_sources(by_rank) == name
    assert describe_sources(by_rank, device_watts=None, host_watts=None) == said
    assert num_devices(by_rank) == devices
    assert set(name.split("+")) <= {source.value for source in Source}


def test_a_thread_reads_counters_that_go_round(driver, tmp_path, monkeypatch):
    device = driver(milliwatts=1_000_000)
    monkeypatch.setattr(nvml.PowerOverTime, "sample_seconds", 0.01)
    meter = RankMeter(UUID, host_watts=1e-9, powercap=tmp_path)
    meter.begin(0, [meter.sources])
    time.sleep(0.3)
    device.milliwatts = 0
    time.sleep(0.1)
    before = meter.joules()
    assert before > 100
    time.sleep(0.1)
    assert meter.joules() == pytest.approx(before, abs=1)
    meter.close()
