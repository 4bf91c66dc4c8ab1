"""The hooks of other packages that hfdist overrides or calls: a new release that moves one must fail here first."""

import importlib
import inspect
import re

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from huggingface_hub.serialization._base import parse_size_to_int
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralModel,
    PreTrainedModel,
    TrainerState,
    TrainingArguments,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface, apply_expert_parallelism
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_tensor_parallelism
from transformers.integrations import integration_utils
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils.output_capturing import OutputRecorder

from hfdist.checkpoint.save_plan import MAX_MODEL_FILE_BYTES
from hfdist.run.callbacks.trackers import Trackers
from hfdist.strategies import context
from hfdist.strategies.tensor.linear import GATHERED, LOOKED_UP
from hfdist.strategies.tensor.plan import _PARTIAL
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.trainer import DistributedTrainerMixin

HOOKS = {
    "_clip_grad_norm", "_finalize_training", "_get_grad_norm", "_get_num_items_in_batch", "_get_train_sampler",
    "_init_training_state", "_load_best_model", "_load_from_checkpoint", "_load_rng_state",
    "_maybe_log_save_evaluate", "_prepare_for_training", "_run_epoch", "_save_checkpoint",
    "_sync_replicated_trainable_parameters", "_defer_fsdp_gradient_reduction", "call_model_init", "compute_loss",
    "create_accelerator_and_postprocess", "floating_point_ops", "get_batch_samples",
    "get_decay_parameter_names", "get_eval_dataloader", "get_total_train_batch_size", "get_tp_size",
    "get_train_dataloader", "hyperparameter_search", "log", "predict", "save_model", "store_flos", "train",
    "training_step",
}  # fmt: skip


def parameters(function):
    return list(inspect.signature(function).parameters)


OURS = (DistributedTrainerMixin, EngineTrainer)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OURS for name in sorted(HOOKS & set(vars(kind)))])
def test_an_override_takes_what_the_trainers_hook_takes(kind, name):
    ours, theirs = (parameters(getattr(kind, name)) for kind in (kind, transformers.Trainer))
    if ours[-2:] == ["args", "kwargs"]:
        ours, theirs = ours[:-2], theirs[: len(ours) - 2]
    assert len(ours) == len(theirs) if name == "_init_training_state" else ours == theirs


def test_every_override_is_a_hook():
    own = {name for kind in OURS for name, value in vars(kind).items() if inspect.isfunction(value)}
    overrides = {name for name in own if hasattr(transformers.Trainer, name) and not name.startswith("__")}
    assert overrides - {"evaluation_loop"} == HOOKS
    # `Optimizers` takes its place on the Trainer itself.
    assert parameters(transformers.Trainer.create_optimizer) == ["self", "model"]


def test_the_evaluation_loop_begins_with_what_we_read():
    names = parameters(transformers.Trainer.evaluation_loop)
    assert names[:3] == ["self", "dataloader", "description"]
    assert "metric_key_prefix" in names


def test_the_step_is_called_through_the_hooks():
    """The loop must still reach the hooks: a renamed call would leave our override unused without a word."""
    loop = inspect.getsource(transformers.Trainer._run_epoch)
    for call in ("self.training_step(", "self._clip_grad_norm(", "self.get_batch_samples(", "self.floating_point_ops("):
        assert call in loop
    assert "self._save_checkpoint(" in inspect.getsource(transformers.Trainer._maybe_log_save_evaluate)
    for call in ("self._prepare_for_training(", "self._finalize_training("):
        assert call in inspect.getsource(transformers.Trainer._inner_training_loop)


def test_loaders_are_made_where_they_are_dealt():
    source = inspect.getsource(transformers.Trainer._get_dataloader)
    assert "self.accelerator.prepare(DataLoader(dataset, **dataloader_params))" in source
    assert parameters(transformers.Trainer._get_dataloader)[:4] == ["self", "dataset", "description", "batch_size"]
    assert "self._eval_dataloaders[dataloader_key]" in source
    # The pass that a resume begins in is told by these; and an empty one ends at this flag.
    assert {"epoch", "epochs_trained", "steps_trained_in_current_epoch"} <= set(
        parameters(transformers.Trainer._run_epoch)
    )
    assert "self.control.should_epoch_stop" in inspect.getsource(transformers.Trainer._run_epoch)
    sampler = LengthGroupedSampler(3, lengths=[4, 2, 1])
    assert (sampler.batch_size, sampler.generator) == (3, None)


def test_private_names_elsewhere():
    assert parameters(transformers.Trainer._get_output_dir) == ["self", "trial"]
    assert parameters(transformers.Trainer._push_from_checkpoint) == ["self", "checkpoint_folder"]
    for caller in ("get_batch_samples", "prediction_step"):
        assert "self._get_num_items_in_batch(" in inspect.getsource(getattr(transformers.Trainer, caller))
    loop = inspect.getsource(transformers.Trainer.evaluation_loop)
    assert "self.callback_handler.on_prediction_step(args, self.state, self.control)" in loop
    assert "self.callback_handler.eval_dataloader = dataloader" in loop
    assert parameters(PreTrainedModel._init_weights) == ["self", "module"]
    assert {"num_input_tokens_seen", "global_step", "log_history"} <= set(parameters(TrainerState))
    assert {"activation_checkpointing", "average_tokens_across_devices", "ignore_data_skip"} <= set(
        parameters(TrainingArguments)
    )


def test_what_the_names_of_saved_weights_follow():
    assert parameters(revert_weight_conversion) == ["model", "state_dict"]
    assert parameters(remove_tied_weights_from_state_dict) == ["state_dict", "model"]
    source = inspect.getsource(PreTrainedModel.save_pretrained)
    calls = [source.index(call) for call in (
        "self._keys_to_ignore_on_save", "remove_tied_weights_from_state_dict(", "= revert_weight_conversion(",
        "split_torch_state_dict_into_shards(",
    )]  # fmt: skip
    assert calls == sorted(calls)
    assert 'getattr(model, "_weight_conversions", None)' in inspect.getsource(revert_weight_conversion)
    limit = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    assert parse_size_to_int(limit) == MAX_MODEL_FILE_BYTES


def test_what_tensor_and_context_parallelism_call():
    assert parameters(PreTrainedModel._resolve_parallel_plans) == ["self", "distributed_config"]
    assert parameters(apply_tensor_parallelism) == ["model", "tp_mesh", "tp_plan"]
    assert parameters(apply_expert_parallelism) == ["model", "ep_mesh", "tp_mesh", "plan", "ep_implementation"]
    # Packed matrices: by this number their parts are known.
    assert _StridedShard(0, split_factor=2).split_factor == 2
    collectives = torch.distributed._functional_collectives
    assert parameters(context._all_gather)[:3] == ["self", "gather_dim", "group"]
    assert parameters(collectives.all_to_all_single)[:4] == ["self", "output_split_sizes", "input_split_sizes", "group"]
    assert parameters(collectives.all_reduce)[:3] == ["self", "reduceOp", "group"]
    assert parameters(collectives.all_gather_tensor)[:3] == ["self", "gather_dim", "group"]
    assert parameters(DeviceMesh._flatten)[:2] == ["self", "mesh_dim_name"]


def test_which_plans_transformers_resolves():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "num_local_experts": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
    tensor, no_experts, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    assert tensor["model.layers.0.self_attn.q_proj"] == "colwise"
    assert no_experts == {}
    no_tensor, experts, _ = model._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))
    assert no_tensor == {}
    assert experts == {
        "model.layers.0.mlp.experts": "ep_dispatch_experts",
        **{f"model.layers.0.mlp.experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")},
    }
    known = {"colwise", "rowwise", "colwise_rep", GATHERED, LOOKED_UP, _PARTIAL, "packed_colwise", "packed_rowwise"}
    assert known <= ALL_PARALLEL_STYLES.keys()
    assert "all_to_all" in EPImplementationInterface()


def test_by_what_transformers_knows_a_model_whose_forwards_are_collectives():
    model = torch.nn.Linear(1, 1)
    assert not is_fsdp_managed_module(model)
    model._is_fsdp_managed_module = True
    assert is_fsdp_managed_module(model)


def test_how_transformers_says_which_outputs_are_of_routers():
    recorders = MixtralModel.can_record_outputs.fget(MixtralModel)
    recorder = recorders["router_logits"]
    assert isinstance(recorder, OutputRecorder)
    assert {"target_class", "index", "layer_name"} <= set(vars(recorder))


def test_the_flag_that_keeps_ddp_away_is_read_where_we_need_it():
    assert "self.is_distributed_loading_by_transformers" in inspect.getsource(
        transformers.Trainer._prepare_for_training
    )


STEP = {
    "training_step": {
        "_get_learning_rate", "_prepare_context_parallel_inputs", "_prepare_inputs", "accelerator", "args",
        "compute_loss", "compute_loss_context_manager", "compute_loss_func", "current_gradient_accumulation_steps",
        "loss_is_scaled_for_ga", "model_accepts_loss_kwargs", "optimizer", "state",
    },
    "compute_loss": {
        "accelerator", "args", "compute_loss_func", "get_tp_size", "label_smoother", "model",
        "model_accepts_loss_kwargs",
    },
    "_prepare_inputs": {"_prepare_input", "_signature_columns"},
    "_prepare_input": {"_prepare_input", "accelerator", "args", "is_deepspeed_enabled"},
    "_clip_grad_norm": {"_has_mixed_mesh_grads", "_mixed_mesh_grad_norm", "accelerator", "args", "optimizer"},
}  # fmt: skip


@pytest.mark.parametrize("name", STEP)
def test_the_original_step_asks_for_nothing_else(name):
    """`EngineTrainer` and the engines do the same without these questions."""
    source = inspect.getsource(getattr(transformers.Trainer, name))
    assert set(re.findall(r"self\.(\w+)", source)) == STEP[name]


def test_accelerates_backward_and_optimizer_do_what_we_do():
    assert "loss = loss / self.gradient_accumulation_steps" in inspect.getsource(Accelerator.backward)
    # By 1: the Trainer accumulates.
    assert 'grad_acc_kwargs["num_steps"] = 1' in inspect.getsource(
        transformers.Trainer.create_accelerator_and_postprocess
    )
    assert "self.prepare_optimizer(obj, device_placement=device_placement)" in inspect.getsource(
        Accelerator._prepare_one
    )
    assert parameters(Accelerator.prepare_optimizer) == ["self", "optimizer", "device_placement"]
    # Of all that a step does, what is left without XLA, LOMO and a loss scale.
    step = inspect.getsource(AcceleratedOptimizer.step)
    assert set(re.findall(r"\bis_\w+|DistributedType\.\w+", step)) == {
        "is_lomo_available", "is_xla_gradients_synced", "DistributedType.XLA",
    }  # fmt: skip
    assert "if self.gradient_state.sync_gradients:" in step


def test_accelerate_deals_batches_where_we_replace_it():
    names = parameters(Accelerator.prepare_data_loader)
    assert names == ["self", "data_loader", "device_placement", "slice_fn_for_dispatch"]
    assert "self.prepare_data_loader(" in inspect.getsource(Accelerator._prepare_one)
    assert {"num_processes", "process_index", "even_batches", "use_seedable_sampler"} <= set(
        parameters(prepare_data_loader)
    )


def test_a_loss_scaler_keeps_its_verdicts_where_we_share_them():
    assert "found_inf_per_device" in inspect.getsource(torch.amp.GradScaler._found_inf_per_device)


def test_deepspeeds_stage_1_steps_after_a_schedule():
    zero = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    assert "pipeline_parallel" in parameters(zero.reduce_gradients)
    assert "self._global_grad_norm" in inspect.getsource(zero.step)
    assert "ds_pipe_replicated" in inspect.getsource(zero.get_grad_norm_direct)


def test_deepspeed_asks_the_table_of_operators_that_we_empty():
    backend = importlib.import_module("deepspeed.comm.torch")
    assert "deepspeed.ops.__compatible_ops__.get(builder.NAME, False)" in inspect.getsource(backend.build_shm_op)


def test_trackers_are_as_the_subclasses_take_them_to_be():
    """Each holds its package in an attribute, opens its run in `setup`, and hears of events that hfdist passes on."""
    held = {"TensorBoard": "_SummaryWriter", "Wandb": "_wandb", "Trackio": "_trackio", "MLflow": "_ml_flow"}
    for name, attribute in held.items():
        theirs = getattr(integration_utils, f"{name}Callback")
        assert f"self.{attribute} =" in inspect.getsource(theirs.__init__)
        if name != "TensorBoard":
            assert parameters(theirs.setup)[:4] == ["self", "args", "state", "model"]
    wandb, mlflow = integration_utils.WandbCallback.setup, integration_utils.MLflowCallback.setup
    assert "if self._wandb.run is None:" in inspect.getsource(wandb), "a run that has begun is used"
    assert all(
        f"MLFLOW_{name}" in inspect.getsource(mlflow) for name in ("RUN_ID", "EXPERIMENT_NAME", "MAX_LOG_PARAMS")
    )
    of_trackers = {
        event
        for tracker in integration_utils.INTEGRATION_TO_CALLBACK.values()
        for event in dir(tracker)
        if event.startswith("on_") and getattr(tracker, event) is not getattr(transformers.TrainerCallback, event)
    }
    assert of_trackers - {event for event in vars(Trackers) if event.startswith("on_")} == {"on_push_begin"}
