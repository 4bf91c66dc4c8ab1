"""Devices and the machines that they are in: what each can do, from a file of conf/hardware/ or of the user's own.

The one source of peaks, sizes and bandwidths: MFU and plans read it. conf/hardware/h100_80gb.yaml says what the keys
mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hfdist.config.composition.files import read_config
from hfdist.config.composition.section import Section
from hfdist.config.ranges import limited
from hfdist.config.train import Precision

CPU = "cpu"
"""The name of this machine without its GPUs: nothing is read, all is measured."""
_GROUP = "hardware"
_KEY = "plan.hardware"
_LESS = re.compile(r"MIG|GRID|LAPTOP|MAX|\d+[ABCQ]")
"""Words in the name of a part of a device, or of one that runs slower than the rest of the name says."""
_GIB, _TERA, _GIGA, _MICRO = 2.0**30, 1e12, 1e9, 1e-6
START_SECONDS = 8.4e-6
"""Seconds of a collective on GPUs before its first hop: NCCL's own estimate, as those of hops below."""


@dataclass(kw_only=True)
class Tflops:
    """`hardware.tflops.*`: dense peaks of matrix products with float32 sums, by type; null: no units for it."""

    fp32: float = limited(1.0, above=0)
    tf32: float | None = limited(None, above=0)
    bf16: float | None = limited(None, above=0)
    fp16: float | None = limited(None, above=0)
    fp8: float | None = limited(None, above=0)


@dataclass(kw_only=True)
class Hardware:
    """`hardware.*`: one device as torch counts them, in a machine of several."""

    devices: list[str] = field(default_factory=list)
    memory_gib: float = limited(1.0, above=0)
    tflops: Tflops = field(default_factory=Tflops)
    reached: float = limited(0.62, above=0, at_most=1)
    memory_gb_per_second: float = limited(1.0, above=0)
    link_gb_per_second: float = limited(1.0, above=0)
    # The latencies of a hop are those by which NCCL chooses its algorithms (src/graph/tuning.cc, protocol Simple).
    link_latency_us: float = limited(3.4, at_least=0)
    network_gb_per_second: float = limited(1.0, above=0)
    network_latency_us: float = limited(14.0, at_least=0)
    kernel_us: float = limited(6.0, at_least=0)
    host_gb_per_second: float = limited(20.0, above=0)
    devices_per_machine: int = limited(8, at_least=1)
    watts: float | None = limited(None, above=0)
    price_per_hour: float | None = limited(None, at_least=0)
    name: str = ""
    """Name of the file that describes the hardware, without its suffix."""
    core_share: float = limited(1.0, above=0, at_most=1)
    """Share of a core that each process has while all of them compute; one that waits leaves its own to the others."""

    @property
    def is_cpu(self) -> bool:
        """Whether ranks compute on cores, which also send, and do one thing after the other."""
        return self.name == CPU or self.devices == [CPU]

    @property
    def device_type(self) -> str:
        """The device's type in torch: `cpu` or `cuda`."""
        return "cpu" if self.is_cpu else "cuda"

    @property
    def memory_bytes(self) -> float:
        """Memory of one device, in bytes."""
        return self.memory_gib * _GIB

    @property
    def half_flops(self) -> float | None:
        """The peak that MFU counts, in operations a second: of bf16, or fp16 where there is no bf16."""
        tflops = self.tflops.bf16 or self.tflops.fp16
        return None if tflops is None else tflops * _TERA

    def mfu(self, flops_per_second: float) -> float | None:
        """Give the share of the peak that one device reaches; None: that is not known, or of a CPU, which has none."""
        peak = None if self.is_cpu else self.half_flops
        return None if peak is None else flops_per_second / peak

    def peak_flops(self, precision: Precision, *, uses_tf32: bool = False) -> float:
        """Give the operations a second of `train.precision`: where there are no units for it, those of float32."""
        tflops = self.tflops
        found = {
            Precision.fp32: tflops.tf32 if uses_tf32 else None,
            Precision.bf16: tflops.bf16,
            Precision.fp16: tflops.fp16,
            Precision.fp8: tflops.fp8 or tflops.bf16,
        }[precision]
        return (found or tflops.fp32) * _TERA

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second that a device reads from and writes to its memory."""
        return self.memory_gb_per_second * _GIGA

    @property
    def host_bytes_per_second(self) -> float:
        """Bytes a second of the host's memory that each process has while all of them read and write."""
        return self.host_gb_per_second * _GIGA

    @property
    def kernel_seconds(self) -> float:
        """Seconds to start one operation."""
        return self.kernel_us * _MICRO

    def link(self, *, crosses_machines: bool) -> tuple[float, float]:
        """Give what one device sends in bytes a second, and the seconds until a message arrives."""
        if crosses_machines:
            return self.network_gb_per_second * _GIGA, self.network_latency_us * _MICRO
        return self.link_gb_per_second * _GIGA, self.link_latency_us * _MICRO


@cache
def _section() -> Section[Hardware]:
    return Section(Hardware, _GROUP)


def read_hardware(name: str, own: Path | None = None) -> Hardware:
    """Read what a device can do.

    Args:
        name: the name of a file in a folder `hardware`, or the path of a file.
        own: a folder of the user's own, laid out as `conf/`, whose files win.

    Raises:
        ConfigError: there is no such hardware, or a file that is wrong.
    """
    path = _section().find(name, own, key=_KEY, hint=f"{_KEY}=h100_80gb", others=(CPU,))
    return _read(path)


def _read(path: Path) -> Hardware:
    hardware: Hardware = _section().compose(path)
    hardware.name = path.stem
    return hardware


def match_device(device: str, own: Path | None = None) -> Hardware | None:
    """Find a device by torch's name of it, such as `NVIDIA H100 80GB HBM3`; None: not a known whole one.

    All words of one of the names in a file must be there. Of several that fit, the one with most words counts.
    """
    words = set(re.findall(r"\w+", device.upper()))
    if any(_LESS.fullmatch(word) for word in words):
        return None
    fitting: list[tuple[int, Path]] = []  # number of words, and the file
    for path in _section().options(own).values():
        # Only the names are read here: the file that fits is checked whole.
        names = read_config(path).get("devices") or []
        listed = [set(str(one).upper().split()) for one in names]
        fitting += [(len(one), path) for one in listed if one <= words]
    return _read(max(fitting)[1]) if fitting else None
