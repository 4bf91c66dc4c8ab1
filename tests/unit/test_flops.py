"""Peaks of devices by the names that torch.cuda.get_device_name gives them."""

import pytest

from hfdist.models.flops import find_peak_flops

# In TFLOP/s, dense bf16 (fp16 where there is no bf16).
PEAKS = {
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H800": 989,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A30": 165,
    "NVIDIA A40": 150,
    "NVIDIA RTX A6000": 155,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 4090 D": 147,
    "NVIDIA GeForce RTX 5090": 209,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307,
    # Parts and slower kinds of those, and others.
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA H100 80GB HBM3 MIG 2g.20gb": None,
    "GRID A100-10C": None,
    "NVIDIA A40-48Q": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 2080 Ti": None,
    "NVIDIA RTX A4000": None,
    "NVIDIA T400 4GB": None,
    "Quadro RTX 6000": None,
    "AMD Radeon Graphics": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_device_has_the_peak_of_its_whole_name(name):
    peak = find_peak_flops(name)
    assert (None if peak is None else peak / 1e12) == PEAKS[name]
