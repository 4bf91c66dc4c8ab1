"""What a run imports, imported once before tests fork ranks and recipes: else each of them takes seconds for it."""

import functools
import gc
import importlib
import pkgutil

import accelerate.utils.imports
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from transformers import LlamaConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import hfdist
from hfdist.models.shrink import shrink
from hfdist.records import PACKAGES, find_versions
from tests.huge_pages import use_huge_pages

# Beside all of hfdist: what transformers, accelerate and DeepSpeed import when they are first used.
IMPORTED_LATE = (
    "datasets",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.pipelining.schedules",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.t5.modeling_t5",
)


@functools.cache
def import_all() -> None:
    """Import it, in the process that will fork, and make what all its forks would make."""
    gc.disable()
    for module in pkgutil.walk_packages(hfdist.__path__, "hfdist."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    # accelerate reads the metadata of a package at each question, some 20 times in a Trainer of TRL's.
    accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)
    # transformers makes the table of all types at its first use: a third of a second of each rank.
    get_checkpoint_conversion_mapping("llama")
    # Patterns of names of fields are compiled at their first use.
    shrink(LlamaConfig())
    find_versions((*PACKAGES, "peft"))
    quicken_agent()
    gc.freeze()
    gc.enable()
    use_huge_pages()


def quicken_agent() -> None:
    """Let torch's agent not look up by which method it logs, among all modules for each frame of pytest's stack.

    Of each launch it is a second, and nobody reads that log.
    """
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
