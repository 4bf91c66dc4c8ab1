"""The names of other trainers, and values and options as they call them, with what hfdist has in their place."""

from __future__ import annotations

from hfdist.config.task import TaskName
from hfdist.topology import MODEL_AXES, PARTS

HUB_DATA = "data=hub data.sources.hub.path={value}"
REWARDS = "'task.rewards={{value}: 1.0}'"
HELD_OUT = "data.eval_fraction=0 data.eval_sources.val.path={value}"
BETAS = "optimizer.beta1={value} optimizer.beta2={value}"
OWN_REWARD = "a reward of your own comes from an installed package: docs/rewards.md#a-reward-of-your-own"
STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "dpo", "kto": "kto", "rm": "reward", "ppo": "ppo"}
"""Stages of LLaMA-Factory, with the command that does them."""
_OVERRIDES = {
    "train.global_batch_size={value}": "batch_size train_batch_size effective_batch_size",
    "train.micro_batch_size={value}": "per_device_train_batch_size per_device_batch_size "
    "per_gpu_train_batch_size train_micro_batch_size_per_gpu device_train_microbatch_size",
    "train.eval_micro_batch_size={value}": "per_device_eval_batch_size",
    "train.max_steps={value}": "steps num_steps max_train_steps train_iters max_iters total_steps",
    "train.epochs={value}": "num_train_epochs num_epochs max_epochs",
    "train.eval_every={value}": "eval_steps eval_interval evaluate.every evaluate.steps evaluate.interval",
    "evaluate.patience={value}": "early_stopping_patience",
    "evaluate.min_delta={value}": "early_stopping_threshold",
    "evaluate.export=best checkpoint.keep_best=true": "load_best_model_at_end",
    "evaluate.at_start={value}": "eval_on_start",
    "evaluate.lm_eval={value}": "evaluate.tasks lm_eval_tasks",
    HELD_OUT: "validation_file eval_file eval_dataset data.eval data.val data.validation data.test",
    "data.packing=best_fit": "sample_packing padding_free",
    "data.packing=auto": "packing",
    "data.packing=none": "group_by_length",
    "train.max_grad_norm={value}": "clip_grad gradient_clipping",
    "train.precision=fp16": "fp16 fp16_full_eval",
    "train.precision=bf16": "bf16 bf16_full_eval",
    "train.precision={value}": "mixed_precision",
    "train.compile=blocks": "torch_compile",
    "train.gradient_checkpointing={value}": "activation_checkpointing",
    "train.seed={value}": "seed",
    "optimizer.lr={value}": "learning_rate",
    "optimizer.beta1={value}": "adam_beta1",
    "optimizer.beta2={value}": "adam_beta2",
    BETAS: "betas adam_betas",
    "optimizer.weight_decay={value}": "wd",
    "optimizer.eps={value}": "adam_epsilon adam_eps optimizer.epsilon",
    "optimizer.name={value}": "optim",
    "optimizer.schedule={value}": "lr_scheduler_type lr_scheduler scheduler",
    "optimizer.warmup_steps={value}": "num_warmup_steps lr_warmup_steps warmup_iters",
    "optimizer.warmup_fraction={value}": "warmup_ratio",
    "data.sequence_length={value}": "block_size seq_length sequence_len max_length max_seq_length max_seq_len "
    "model_max_length context_length cutoff_len",
    "data={value}": "data.path data.file data.files data.train data_path data_files",
    HUB_DATA: "dataset dataset_name",
    "model.name={value}": "model.path model.name_or_path model.id",
    "data=hub data.sources.hub.subset={value}": "dataset_config_name",
    "data=files data.sources.files.path={value}": "train_file",
    "data.sources.files.text={value}": "text_column dataset_text_field",
    "'data.chat.template_arguments={enable_thinking: false}'": "chat_template_kwargs",
    # These are said with true or false: see `override_for`.
    "data.chat.train_on=assistant": "assistant_only_loss completion_only_loss",
    "data.chat.train_on=all": "train_on_inputs",
    "data.workers={value}": "num_workers dataloader_num_workers preprocessing_num_workers dataset_num_proc",
    "data.prefetch={value}": "dataloader_prefetch_factor",
    "export.push_to=OWNER/NAME": "push_to_hub",
    "export.push_to={value}": "hub_model_id",
    "export.private={value}": "hub_private_repo",
    "export.revision={value}": "hub_revision",
    "model={value}": "model_name model_name_or_path pretrained_model_name_or_path base_model model_id",
    "model.type={value}": "model_type",
    "model.config.hidden_size=512": "config_overrides",
    "model.tokenizer.name={value}": "tokenizer_name",
    "model.dtype={value}": "torch_dtype dtype",
    "model.attention={value}": "attn_implementation",
    "model.attention=flash_attention_2": "flash_attention flash_attn use_flash_attention_2",
    "model.attention=sdpa": "sdp_attention sdpa_attention",
    "model.config.hidden_size={value}": "hidden_size n_embd d_model",
    "model.config.intermediate_size={value}": "intermediate_size",
    "model.config.num_hidden_layers={value}": "num_hidden_layers num_layers n_layer n_layers",
    "model.config.num_attention_heads={value}": "num_attention_heads n_head n_heads num_heads",
    "model.config.num_key_value_heads={value}": "num_key_value_heads n_kv_heads num_kv_heads",
    "model.config.attention_dropout={value}": "attention_dropout",
    "adapter=lora adapter.rank={value}": "lora_r lora_rank adapter.r",
    "adapter=lora adapter.alpha={value}": "lora_alpha",
    "adapter=lora adapter.dropout={value}": "lora_dropout",
    "adapter=lora adapter.targets=[{value}]": "lora_target_modules target_modules lora_target",
    "adapter=lora adapter.targets=[all-linear]": "lora_target_linear",
    "adapter=lora": "use_peft peft_type lora",
    "adapter=qlora": "bnb_4bit_quant_type qlora",
    "strategy=zero{value}": "zero_stage stage zero",
    "strategy=zero2 strategy.deepspeed={value}": "deepspeed deepspeed_config",
    "strategy=zero3_offload": "cpu_offload offload_optimizer offload_param offload_params",
    "strategy=fsdp2": "fsdp fsdp_config sharding_strategy fsdp_sharding_strategy",
    **{
        f"strategy.{axis}={{value}}": f"{axis[0]}p {axis[0]}p_size {axis}_parallel_size"
        # Axes that divide the model, as Megatron names them.
        + f" {axis}_model_parallel_size" * (axis in ("pipeline", *PARTS))
        for axis in ("data", *MODEL_AXES)
    },
    "launch.processes={value}": "num_processes nproc_per_node num_gpus gpus devices world_size",
    "watch.heartbeat_seconds={value}": "watch.timeout watch.timeout_seconds",
    "plan.processes={value}": "plan.gpus plan.num_gpus plan.devices plan.world_size",
    "launch.max_restarts={value}": "max_restarts",
    "run.dir={value}": "output_dir",
    "run.name={value}": "run_name",
    "checkpoint.every={value}": "save_steps",
    "checkpoint.keep={value}": "save_total_limit",
    "checkpoint.resume={value}": "resume_from_checkpoint resume",
    "report.log_every={value}": "logging_steps log_interval",
    "report.progress=false": "disable_tqdm",
    "report.to=[{value}]": "report_to",
    "report.to=[wandb]": "report.wandb use_wandb wandb",
    "report.project={value}": "project",
    "report.to=[wandb] report.project={value}": "wandb_project",
    "task.beta={value}": "pref_beta dpo_beta kl_coef kl_coeff",
    "task.nll_weight={value}": "rpo_alpha cpo_alpha pref_ftx",
    "task.margin={value}": "simpo_gamma",
    "cluster.nodes={value}": "cluster.num_nodes cluster.nnodes cluster.machines",
    "cluster.hours={value}": "cluster.time cluster.walltime cluster.time_limit",
    "task.loss={value}": "loss_type pref_loss",
    REWARDS: "reward_funcs reward_functions",
    "task.clip={value}": "epsilon",
    "task.clip_high={value}": "epsilon_high",
    "task.mask_truncated={value}": "mask_truncated_completions",
    "task.max_new_tokens={value}": "max_completion_length",
    "train.arguments.use_liger_kernel={value}": "use_liger_kernel",
    "train.arguments.ddp_timeout={value}": "ddp_timeout",
    "train.arguments.neftune_noise_alpha={value}": "neftune_noise_alpha",
}
"""An override, in which `{value}` is replaced by the value that was given, and the names that mean it."""
OVERRIDES = {name: override for override, names in _OVERRIDES.items() for name in names.split()}
OVERRIDES |= dict.fromkeys(("strategy.stages", "num_stages"), "strategy.pipeline={value}")

_QUANTIZED = "adapter=qlora has the frozen weights in 4 bits"
_CHAT_TEMPLATE = "a model's own is used; data.chat.template=chatml, or a Jinja file, is for one that has none"
_PROCESSES = "launch.processes=2 starts two processes on this machine"
_TOKENS = "special tokens are the tokenizer's own: save_pretrained of a changed one, and model.tokenizer.name=FOLDER"
_NO_GPU = "a machine without a GPU trains on the CPU; launch.processes=2 starts two ranks on it"
_UPLOAD = "export.push_to=OWNER/NAME uploads the model at the end"
_BATCH = "it follows from train.global_batch_size / (train.micro_batch_size x data ranks): set train.global_batch_size"
REASONS = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches", "grad_accum"), _BATCH
    ),
    **dict.fromkeys(
        ("global_batch_tokens", "batch_size_tokens", "batch_tokens", "total_batch_size_tokens", "tokens_per_batch"),
        "train.global_batch_size=... counts sequences: the tokens, divided by data.sequence_length",
    ),
    **dict.fromkeys(("shuffle", "shuffle_data"), "the order is always shuffled; data.seed=1 draws another"),
    **dict.fromkeys(
        ("num_microbatches", "microbatches", "num_micro_batches", "pipeline_num_microbatches"),
        "their number is train.global_batch_size / (train.micro_batch_size x data ranks): set train.micro_batch_size",
    ),
    **dict.fromkeys(
        ("min_lr", "lr_min", "min_learning_rate", "eta_min"),
        "optimizer.min_lr_ratio=0.1 is a share of optimizer.lr",
    ),
    "max_time": "train.max_hours=2 stops a run, saved, after so many hours",
    "partition": "cluster.slurm.partition=NAME of `hfdist job to=slurm`",
    "modules": "'cluster.setup=[\"module load NAME\"]' of `hfdist job`",
    "cfg": "`hfdist pretrain ... --cfg job` prints the config of a run",
    "sequence_parallel": "strategy=long_context shares sequences out",
    "dry_run": "--cfg job prints the config; `hfdist plan` says what a run needs",
    "export.format": "model/ has safetensors; convert_hf_to_gguf.py of llama.cpp makes GGUF of it",
    "export.dtype": "it is written as it was trained; the dtype of from_pretrained reads it otherwise",
    "checkpoint.save_optimizer": "a checkpoint has all that a resume needs; checkpoint=none writes the model alone",
    "split": "leave it out, as a file has no splits; a dataset of the Hub has data.sources.hub.split",
    **dict.fromkeys(
        ("max_samples", "max_train_samples", "num_samples"),
        "train.max_steps=100 trains on fewer; `head -n 1000` of a file has its first rows",
    ),
    "config_file": "--config FILE.yaml, if it is one of hfdist; accelerate launch takes accelerate's own",
    "do_train": "the command says what is done: `hfdist pretrain` trains",
    "do_eval": "the run evaluates at the end; train.eval_every=100 does it before, too; data.eval_fraction=0: never",
    "streaming": "data is always streamed",
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "quantization_bit": _QUANTIZED,
    **dict.fromkeys(("val_set_size", "val_size", "test_size"), "data.eval_fraction=0.02 is a share of the documents"),
    "finetuning_type": "adapter=lora trains an adapter, adapter=none all weights, train.freeze=[...] some of them",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "train.eval_every=100; null: at the end alone"),
    "save_strategy": "checkpoint.every=100; checkpoint=none saves nothing",
    "logging_strategy": "report.log_every=10",
    "metric_for_best_model": "the held-out loss decides: evaluate.export=best checkpoint.keep_best=true",
    "overwrite_output_dir": "nothing is overwritten: another run.name begins anew",
    "importance_sampling_level": "task.loss=gspo compares whole answers, as task=rloo does; other losses: tokens",
    "use_vllm": "task.server=vllm task.server_addresses=[http://127.0.0.1:8000]; task.generators=1 needs no server",
    "wandb_entity": "report.to=[wandb], and WANDB_ENTITY=... in the environment",
    **dict.fromkeys(
        ("nnodes", "num_nodes", "num_machines", "node_rank", "machine_rank", "master_addr", "main_process_ip"),
        "a launcher on each machine, torchrun or accelerate launch, with the recipe: see docs/machines.md",
    ),
    "parallelism_config": "strategy=tensor, strategy=long_context and strategy=3d are such layouts",
    "auto_find_batch_size": "train.micro_batch_size=4; `hfdist plan` says what fits",
    "optim_args": "'optimizer.arguments={name: value}' passes them on",
    "lr_scheduler_kwargs": "optimizer.min_lr_ratio=0.1 and optimizer.decay_fraction=0.2 shape a schedule",
    "gradient_checkpointing_kwargs": "train.recompute=cheap keeps what is expensive; train.recompute=all: nothing",
    "save_only_model": "the model is always written at the end; checkpoint=none saves nothing before",
    "hub_strategy": _UPLOAD,
    "hub_always_push": _UPLOAD,
    "datasets": "data=FILES, data=hub data.sources.hub.path=OWNER/NAME, or data=mixture for several",
    "pad_to_sequence_len": "data.packing=best_fit fills sequences with documents; data.packing=none: one in each",
    "max_prompt_length": "data.sequence_length=1024 holds a prompt, or a prompt with its answers",
    "sync_ref_model": "task.ref_model_sync_steps=512 lets the reference follow the model",
    **dict.fromkeys(("ref_model", "reference_model"), "the reference is the model that the run begins with"),
    **dict.fromkeys(("saves_per_epoch", "evals_per_epoch"), "checkpoint.every=100 train.eval_every=100 count steps"),
    "local_rank": f"{_PROCESSES}; a launcher gives each its place",
    **dict.fromkeys(("no_cuda", "use_cpu", "device", "device_map"), _NO_GPU),
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_TOKEN"),
        "a variable of the environment stands before the command",
    ),
    **dict.fromkeys(
        ("training_args", "training_arguments", "TrainingArguments", "trainer"),
        "`train: {max_steps: 20}` and `optimizer: {lr: 1e-4}`; other TrainingArguments in `train: {arguments: {}}`",
    ),
    "config": "--config FILE.yaml",
    "dropout": "model.config.attention_dropout=0.1 of most models; that of an adapter is adapter.dropout",
    **dict.fromkeys(("chat_template", "chat_template_path", "template"), _CHAT_TEMPLATE),
    "init_from": "model=FOLDER begins with its weights; the same command again goes on with its own run",
    "always_save_checkpoint": "checkpoint.every=100; the model is always written at the end",
    "standalone": _PROCESSES,
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _TOKENS),
}
OPPOSITES = {
    "report.to=[{value}]": "report.to=[]",
    HELD_OUT: "data.eval_fraction=0",
    "data.packing=best_fit": "data.packing=none",
    "data.packing=none": "data.packing=best_fit",
    "evaluate.export=best checkpoint.keep_best=true": "evaluate.export=last",
    "data.chat.train_on=assistant": "data.chat.train_on=all",
    "data.chat.train_on=all": "data.chat.train_on=assistant",
    "train.precision=bf16": "train.precision=fp32",
    "train.precision=fp16": "train.precision=fp32",
    "train.compile=blocks": "train.compile=none",
    "model.attention=flash_attention_2": "model.attention=auto",
    "model.attention=sdpa": "model.attention=auto",
    "adapter=lora": "adapter=none",
    "adapter=qlora": "adapter=none",
    "strategy=zero3_offload": "strategy.offload=none",
    "strategy=fsdp2": "strategy=ddp",
    "adapter=lora adapter.targets=[all-linear]": "adapter.targets=[q_proj,v_proj]",
    "export.push_to=OWNER/NAME": "export.push_to=null",
    "report.progress=false": "report.progress=true",
    "report.to=[wandb]": "report.to=[]",
    "data.packing=auto": "data.packing=none",
    "checkpoint.resume={value}": "checkpoint.resume=never",
}
VALUES = {
    "model.loss": dict.fromkeys(("liger", "cut_cross_entropy"), "chunked"),
    "optimizer.name": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "AdamW"), "adamw"),
    "data.format": {"chat_template": "messages", "completion": "text", "chatml": "messages", "dpo": "preference"},
    "strategy.offload": dict.fromkeys(("nvme", "disk", "optimizer", "all", "true"), "cpu"),
    "train.precision": {
        "no": "fp32",
        "false": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "float32": "fp32",
        "16": "fp16",
        "32": "fp32",
        "bf16-mixed": "bf16",
        "16-mixed": "fp16",
    },
    "train.compile": {"true": "blocks", "false": "none"},
    "data.packing": {"true": "auto", "false": "none"},
    "strategy.sharding": {
        "0": "none",
        "1": "zero1",
        "2": "zero2",
        "3": "zero3",
        "fsdp": "fsdp2",
        "full_shard": "fsdp2",
    },
    "model.dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "adapter=lora adapter.targets=[{value}]": {"all": "all-linear"},
    "optimizer.schedule": {
        **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
}
"""Values as others call them, or as they were called, by the key or by the whole override in which they stand."""
_EVALUATES = {"true": "train.eval_every=100", "false": "data.eval_fraction=0"}
OPTIONS = {
    "strategy": {"deepspeed": "strategy=zero2", "zero": "strategy=zero2", "fsdp": "strategy=fsdp2",
                 "tp": "strategy=tensor", "pp": "strategy=pipeline", "cp": "strategy=long_context",
                 "ep": "strategy=moe", "dp": "strategy=ddp", "megatron": "strategy=3d", "0": "strategy=ddp",
                 "1": "strategy=zero1", "2": "strategy=zero2", "3": "strategy=zero3"},
    "watch": dict.fromkeys(("none", "off", "false", "no"), "watch.heartbeat_seconds=null"),
    "task": {"sft": "task=causal_lm", "ipo": "task=dpo task.loss=ipo"}
    | {loss.value: f"task=grpo task.loss={loss.value}" for loss in TaskName.grpo.traits.losses[1:]},
    "evaluate": {**_EVALUATES, "yes": _EVALUATES["true"], "no": _EVALUATES["false"]},
    "adapter": dict.fromkeys(("prefix", "prompt", "ptuning", "prefix_tuning", "peft"), "adapter=lora")
    | dict.fromkeys(("full", "freeze"), "adapter=none"),
    "train": {"fp16": "train.precision=fp16", "fp32": "train.precision=fp32"},
}  # fmt: skip
"""Options of groups as others call them, by group, with the override that does it."""
