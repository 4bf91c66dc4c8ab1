"""Every private name of another package that hfdist uses: its owner, and whether it stands there.

`tests/unit/test_seams.py` walks the table in both directions; `make canary` does so under other versions.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

HFDIST = Path(__file__).parents[1] / "hfdist"

SEAMS = {
    "_Action": "torch.distributed.pipelining.schedules",
    "_C": "torch",
    "_ComputationType": "torch.distributed.pipelining.schedules",
    "_Options": "torch.distributed.ProcessGroupGloo",
    "_SummaryWriter": "transformers.integrations.integration_utils.TensorBoardCallback",
    "_actions": "argparse.ArgumentParser",
    "_add_send_recv": "torch.distributed.pipelining.schedules",
    "_allgather_base_": "torch.ops.c10d",
    "_apply_gate": "transformers.integrations.moe",
    "_attn_implementation": "transformers.PreTrainedConfig",
    "_backward_hooks": "torch.nn.Module",
    "_backward_pre_hooks": "torch.nn.Module",
    "_cast_input_dtype": "peft.tuners.tuners_utils.BaseTunerLayer",
    "_cdata": "torch.UntypedStorage",
    "_clear": "atexit",
    "_compiled_call_impl": "torch.nn.Module",
    "_convert_value": "hydra.core.override_parser.types.Override",
    "_current_frames": "sys",
    "_current_graph_task_id": "torch._C",
    "_data_files": "datasets.Dataset",
    "_dataloaders": "accelerate.Accelerator",
    "_distributed_c10d": "torch._C",
    "_dump_fr_trace_json": "torch.distributed",
    "_dump_nccl_trace_json": "torch.distributed",
    "_eval_dataloaders": "transformers.Trainer",
    "_experts_implementation": "transformers.PreTrainedConfig",
    "_fingerprint": "datasets.Dataset",
    "_flatten": "torch.distributed.device_mesh.DeviceMesh",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_found_inf_per_device": "torch.amp.GradScaler",
    "_functional_collectives": "torch.distributed",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_get_dataloader": "transformers.Trainer",
    "_get_default_group": "torch.distributed.distributed_c10d",
    "_get_header_dict": "hydra.plugins.config_source.ConfigSource",
    "_get_output_dir": "transformers.Trainer",
    "_global_grad_norm": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "_globalstep_last_logged": "transformers.Trainer",
    "_gradient_checkpointing_func": "transformers.PreTrainedModel",
    "_grouped_linear": "transformers.integrations.moe",
    "_grouped_mm": "torch.ops.aten",
    "_has_mixed_mesh_grads": "transformers.Trainer",
    "_hf_peft_config_loaded": "transformers.PreTrainedModel",
    "_hp_optimizer_states_linked": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "_init_weights": "transformers.PreTrainedModel",
    "_initial_global_step": "transformers.Trainer",
    "_instances": "tqdm.tqdm",
    "_is_fsdp_managed_module": "transformers.distributed.fsdp",
    "_is_hf_initialized": "transformers.PreTrainedModel",
    "_issue_warnings_after_load": "transformers.Trainer",
    "_keys_to_ignore_on_save": "transformers.PreTrainedModel",
    "_last_lr": "torch.optim.lr_scheduler.LRScheduler",
    "_lazy_init_hp_params_optimizer_state": "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "_list_add_result": "hydra.plugins.config_source.ConfigSource",
    "_load_optimizer_and_scheduler": "transformers.Trainer",
    "_load_scaler": "transformers.Trainer",
    "_local_scalar_dense": "torch.ops.aten",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_ml_flow": "transformers.integrations.integration_utils.MLflowCallback",
    "_normalize_file_name": "hydra.plugins.config_source.ConfigSource",
    "_orig_mod": "torch._dynamo.OptimizedModule",
    "_overloadpacket": "torch._ops.OpOverload",
    "_prepare_context_parallel_inputs": "transformers.Trainer",
    "_prepare_input": "transformers.Trainer",
    "_prepare_inputs": "transformers.Trainer",
    "_propagate_tensor_meta_non_cached": "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "_push_from_checkpoint": "transformers.Trainer",
    "_reassign_or_swap_out_partitioned_parameters": "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3",
    "_reduce_scatter_base_": "torch.ops.c10d",
    "_reset_state": "accelerate.state.AcceleratorState",
    "_resolve_parallel_plans": "transformers.PreTrainedModel",
    "_run_exitfuncs": "atexit",
    "_save_optimizer_and_scheduler": "transformers.Trainer",
    "_save_rng_state": "transformers.Trainer",
    "_save_scaler": "transformers.Trainer",
    "_scaled_dot_product_cudnn_attention": "torch.ops.aten",
    "_scaled_dot_product_efficient_attention": "torch.ops.aten",
    "_scaled_dot_product_flash_attention": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu": "torch.ops.aten",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch.ops.aten",
    "_schema": "torch._ops.OpOverload",
    "_scoped_library": "torch.library",
    "_shutdown": "threading",
    "_strip_protocol": "fsspec.AbstractFileSystem",
    "_timeout": "torch.distributed.ProcessGroupGloo._Options",
    "_total_loss_scalar": "transformers.Trainer",
    "_tr_loss": "transformers.Trainer",
    "_trackio": "transformers.integrations.integration_utils.TrackioCallback",
    "_trial": "transformers.Trainer",
    "_unsafe_view": "torch.ops.aten",
    "_varlen_attn": "torch.nn.attention.varlen",
    "_version": "torch.Tensor",
    "_wandb": "transformers.integrations.integration_utils.WandbCallback",
    "_weight_conversions": "transformers.core_model_loading",
    "_world": "torch.distributed.distributed_c10d",
    "get_args_parser": "hydra._internal.utils",
    "FakeTensor": "torch._subclasses.fake_tensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "TreeSpec": "torch.utils._pytree",
    "tree_flatten": "torch.utils._pytree",
    "tree_leaves": "torch.utils._pytree",
    "tree_map_only": "torch.utils._pytree",
    "tree_unflatten": "torch.utils._pytree",
    "treespec_dumps": "torch.utils._pytree",
    "treespec_loads": "torch.utils._pytree",
    "_GLOBAL_CLIENT_FACTORY": "huggingface_hub.utils._http",
    "_http": "huggingface_hub.utils",
}
"""Name -> module or class that has it."""

ONLY_IN_SOME_BUILDS = {"_dump_fr_trace_json", "_dump_nccl_trace_json"}
"""Asked for by `getattr`, with something else to do where they are missing."""

NOT_PRIVATE = {"_asdict", "_exit", "_self_", "_target_", "WriteableBuffer"}
"""Documented names of named tuples, `os`, Hydra and typeshed."""

HOLDERS = {
    "_gradient_checkpointing_func": ["transformers.modeling_layers"],
    "_trial": ["transformers.trainer"],
    "_data_files": ["datasets.arrow_dataset"],
    "_is_fsdp_managed_module": ["transformers.distributed.fsdp"],
}
"""Where instances get a name that their class does not have."""


def find_uses() -> dict[str, set[str]]:
    """Find the private names of others in hfdist/: name -> files, relative to it.

    A name belongs to another package where nothing in hfdist defines or assigns it. It is used as an attribute, in an
    import, or as a string: given to `getattr` and the like, in brackets, or in a tuple, list or set.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through half a million nodes again and again
    trees = {path: ast.parse(path.read_text()) for path in sorted(HFDIST.rglob("*.py"))}
    if was_enabled:
        gc.enable()
    own = {name for tree in trees.values() for name in _defined(tree)} | NOT_PRIVATE
    uses: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in set(_used(tree)) - own:
            uses.setdefault(name, set()).add(str(path.relative_to(HFDIST)))
    return uses


def find_missing(name: str) -> str | None:
    """Say why a name of the table is not where the table has it; None: it is there."""
    owner = _import(SEAMS[name])
    if hasattr(owner, name):
        return None
    for holder in [owner, *map(_import, HOLDERS.get(name, ()))]:
        try:
            source = inspect.getsource(holder)
        except (TypeError, OSError):
            continue
        # As an attribute of instances: one that is only assigned here would be assigned for nobody.
        if re.search(rf"(?:\.|[\"']){name}\b", source):
            return None
    return f"{SEAMS[name]} has no {name}"


def _import(path: str) -> Any:
    """Import a module, or what stands in one."""
    module, _, rest = path, "", ""
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
    for part in rest.split(".") if rest else []:
        found = getattr(found, part)
    return found


def _is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                names |= {slot.value for slot in slots if isinstance(slot, ast.Constant)}
    return names


_TAKE_NAMES = {"getattr", "hasattr", "setattr", "delattr", "get", "pop"}


def _called(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def _strings(values: list[ast.expr]) -> list[str]:
    return [str(value.value) for value in values if isinstance(value, ast.Constant) and _is_private(str(value.value))]


def _used(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if _is_private(name):
                names.append(name)
            case ast.Call(args=values) if _called(node) in _TAKE_NAMES:
                names += _strings(values)
            case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values) | ast.Dict(keys=values):
                names += _strings(values)
            case ast.Subscript(slice=ast.Constant() as value):
                names += _strings([value])
            case ast.ImportFrom(module=str(module), names=imported) if not module.startswith("hfdist"):
                private = any(map(_is_private, module.split(".")))
                names += [alias.name for alias in imported if private or _is_private(alias.name)]
            case ast.Import(names=imported):
                names += [part for alias in imported for part in alias.name.split(".") if _is_private(part)]
    return names
