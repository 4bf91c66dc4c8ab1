"""What ranks import is imported once, before the forks: else every rank of every test takes seconds for it."""

import importlib
import pkgutil

import pytest

import hfdist

# Beside all of hfdist: what transformers, accelerate and DeepSpeed import when they are first used.
IMPORTED_LATE = (
    "datasets",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "transformers.models.llama.modeling_llama",
)


@pytest.fixture(scope="session", autouse=True)
def imported():
    for module in pkgutil.walk_packages(hfdist.__path__, "hfdist."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in IMPORTED_LATE:
        importlib.import_module(name)
