"""A plan to describe and to grade."""

from dataclasses import replace

from hfdist.planning.costs import AxisTraffic, PeakMemory, StepTime
from hfdist.planning.plan import Plan
from hfdist.strategies.step_memory import MemoryUse
from hfdist.strategies.traffic import Phase

GIB = 2**30
PLAN = Plan(
    layout="4 processes: data 2 x tensor 2; sharding fsdp2; bf16",
    hardware="h100_80gb",
    processes=4,
    memory=PeakMemory(
        rank=3,
        phase=Phase.backward,
        use=MemoryUse(weights=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, activations=3 * GIB, runtime=GIB),
        low_bytes=18 * GIB,
        high_bytes=22 * GIB,
    ),
    usable_bytes=24 * GIB,
    flops_per_step=4e15,
    time=StepTime(compute=3.0, bubble=0.5, exposed={"tensor": 0.5}, low=3.5, high=5.0),
    tokens_per_step=8000,
    mfu=0.4,
    traffic=(
        AxisTraffic(axis="tensor", sent_bytes=2 * GIB, calls=64, size=2, crosses_machines=False),
        AxisTraffic(axis="data", sent_bytes=GIB, calls=8, size=2, crosses_machines=True, overlaps=Phase.backward),
    ),
    max_steps=900,
    cost=10.0,
    kwh=2.0,
    advice="train.micro_batch_size=4",
)
TOO_LARGE = replace(PLAN, usable_bytes=16 * GIB)
