"""Names that people bring from other trainers, and what to write here instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VALUE = "{value}"
"""Replaced in an override below by the value that was given."""

_QUANTIZED = "quantized weights (QLoRA) are not supported: model.dtype=bfloat16 with adapter=lora is the least memory"

OVERRIDES: Mapping[str, str] = MappingProxyType(
    {
        # steps and batches
        "batch_size": "train.global_batch_size={value}",
        "train_batch_size": "train.global_batch_size={value}",
        "per_device_train_batch_size": "train.micro_batch_size={value}",
        "per_device_batch_size": "train.micro_batch_size={value}",
        "train_micro_batch_size_per_gpu": "train.micro_batch_size={value}",
        "per_device_eval_batch_size": "train.eval_micro_batch_size={value}",
        "steps": "train.max_steps={value}",
        "num_steps": "train.max_steps={value}",
        "max_train_steps": "train.max_steps={value}",
        "num_train_epochs": "train.epochs={value}",
        "num_epochs": "train.epochs={value}",
        "eval_steps": "train.eval_every={value}",
        "early_stopping_patience": "evaluate.patience={value}",
        "early_stopping_threshold": "evaluate.min_delta={value}",
        "load_best_model_at_end": "evaluate.export=best checkpoint.keep_best=true",
        "eval_on_start": "evaluate.at_start={value}",
        "validation_file": "data.eval_fraction=0 data.eval_sources.val.path={value}",
        "clip_grad": "train.max_grad_norm={value}",
        "gradient_clipping": "train.max_grad_norm={value}",
        "fp16": "train.precision=fp16",
        "bf16": "train.precision=bf16",
        "mixed_precision": "train.precision={value}",
        "torch_compile": "train.compile=blocks",
        "activation_checkpointing": "train.gradient_checkpointing={value}",
        # optimizer
        "learning_rate": "optimizer.lr={value}",
        "adam_beta1": "optimizer.beta1={value}",
        "adam_beta2": "optimizer.beta2={value}",
        "adam_epsilon": "optimizer.eps={value}",
        "optim": "optimizer.name={value}",
        "lr_scheduler_type": "optimizer.schedule={value}",
        "lr_scheduler": "optimizer.schedule={value}",
        "scheduler": "optimizer.schedule={value}",
        "num_warmup_steps": "optimizer.warmup_steps={value}",
        "warmup_ratio": "optimizer.warmup_fraction={value}",
        # data
        "block_size": "data.sequence_length={value}",
        "seq_length": "data.sequence_length={value}",
        "max_length": "data.sequence_length={value}",
        "max_seq_length": "data.sequence_length={value}",
        "model_max_length": "data.sequence_length={value}",
        "context_length": "data.sequence_length={value}",
        "dataset": "data=hub data.sources.hub.path={value}",
        "dataset_name": "data=hub data.sources.hub.path={value}",
        "dataset_config_name": "data=hub data.sources.hub.subset={value}",
        "train_file": "data=files data.sources.files.path={value}",
        "text_column": "data.sources.files.text={value}",
        "dataset_text_field": "data.sources.files.text={value}",
        "chat_template": "data.chat.template={value}",
        "chat_template_path": "data.chat.template={value}",
        "chat_template_kwargs": "'data.chat.template_arguments={enable_thinking: false}'",
        # These are said with true or false: see `override_for`.
        "assistant_only_loss": "data.chat.train_on=assistant",
        "completion_only_loss": "data.chat.train_on=assistant",
        "train_on_inputs": "data.chat.train_on=all",
        "num_workers": "data.workers={value}",
        "dataloader_num_workers": "data.workers={value}",
        "preprocessing_num_workers": "data.workers={value}",
        # model
        "push_to_hub": "export.push_to=OWNER/NAME",
        "hub_model_id": "export.push_to={value}",
        "model_name": "model=hub model.name={value}",
        "model_name_or_path": "model=hub model.name={value}",
        "pretrained_model_name_or_path": "model=hub model.name={value}",
        "model_type": "model.type={value}",
        "config_overrides": "model.config.hidden_size=512",
        "tokenizer_name": "model.tokenizer.name={value}",
        "torch_dtype": "model.dtype={value}",
        "attn_implementation": "model.attention={value}",
        "hidden_size": "model.config.hidden_size={value}",
        "intermediate_size": "model.config.intermediate_size={value}",
        "num_hidden_layers": "model.config.num_hidden_layers={value}",
        "num_layers": "model.config.num_hidden_layers={value}",
        "num_attention_heads": "model.config.num_attention_heads={value}",
        # adapters
        "lora_r": "adapter=lora adapter.rank={value}",
        "lora_rank": "adapter=lora adapter.rank={value}",
        "lora_alpha": "adapter=lora adapter.alpha={value}",
        "lora_dropout": "adapter=lora adapter.dropout={value}",
        "lora_target_modules": "adapter=lora adapter.targets=[{value}]",
        "target_modules": "adapter=lora adapter.targets=[{value}]",
        "use_peft": "adapter=lora",
        "peft_type": "adapter=lora",
        # layout
        "zero_stage": "strategy=zero{value}",
        "stage": "strategy=zero{value}",
        "zero": "strategy=zero{value}",
        "deepspeed_config": "strategy=zero2",
        "fsdp": "strategy=zero3",
        "tp_size": "strategy.tensor={value}",
        "tensor_parallel_size": "strategy.tensor={value}",
        "pp_size": "strategy.pipeline={value}",
        "pipeline_parallel_size": "strategy.pipeline={value}",
        "dp_size": "strategy.data={value}",
        "data_parallel_size": "strategy.data={value}",
        "cp_size": "strategy.context={value}",
        "ep_size": "strategy.expert={value}",
        "num_processes": "launch.processes={value}",
        "nproc_per_node": "launch.processes={value}",
        "num_gpus": "launch.processes={value}",
        "world_size": "launch.processes={value}",
        "max_restarts": "launch.max_restarts={value}",
        # run, checkpoints, reports
        "output_dir": "run.dir={value}",
        "run_name": "run.name={value}",
        "save_steps": "checkpoint.every={value}",
        "save_total_limit": "checkpoint.keep={value}",
        "resume_from_checkpoint": "checkpoint.resume={value}",
        "logging_steps": "report.log_every={value}",
        "report_to": "report.to=[{value}]",
    }
)

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "gradient_accumulation_steps": "it follows from train.global_batch_size / (train.micro_batch_size x data "
        "ranks): set train.global_batch_size",
        "do_train": "the command says what is done: `hfdist pretrain` trains",
        "do_eval": "the run always evaluates at the end; train.eval_every says how often before",
        "streaming": "data is always streamed",
        "load_in_4bit": _QUANTIZED,
        "load_in_8bit": _QUANTIZED,
        "local_rank": "launch.processes=2 starts two processes; a launcher gives each its place",
        "no_cuda": "a machine without a GPU trains on the CPU; launch.processes=2 starts two ranks on it",
        "use_cpu": "a machine without a GPU trains on the CPU; launch.processes=2 starts two ranks on it",
    }
)


_OPPOSITES = MappingProxyType(
    {
        "data.chat.train_on=assistant": "data.chat.train_on=all",
        "data.chat.train_on=all": "data.chat.train_on=assistant",
    }
)

_OTHER_WORDS = MappingProxyType(
    {
        f"optimizer.name={name}": "optimizer.name=adamw"
        for name in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "AdamW")
    }
)


def override_for(name: str, value: object = None) -> str | None:
    """Give a ready override for a name of another trainer, from its last part; None: not known."""
    template = OVERRIDES.get(name.rpartition(".")[2])
    if str(value).lower() == "false" and template is not None:
        template = _OPPOSITES.get(template, template)
    if template is None:
        return None
    override = template.replace(VALUE, "..." if value is None else str(value))
    return _OTHER_WORDS.get(override, override)


def reason_against(name: str) -> str | None:
    """Say why hfdist has no key for a name of another trainer; None: not known."""
    return REASONS.get(name.rpartition(".")[2])
