"""The Hugging Face Trainer with an engine under it.

Every override is either what no Trainer has (a stream that seeks, checkpoints by name, evaluation weighted by
tokens) or one line that lets the engine do the step. Without a strategy the Trainer is the original.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput

from hfdist.checkpoint import restore_random_state
from hfdist.collectives import gather_json
from hfdist.data import TokenStream
from hfdist.errors import ConfigError
from hfdist.models.flops import flops_per_token
from hfdist.strategies.base import Batch, Engine, Forward, Strategy, TrainerHooks
from hfdist.trainer import trl_trainers
from hfdist.trainer.checkpointing import checkpointer
from hfdist.trainer.checkpointing.log_history import drop_old
from hfdist.trainer.engine_setup import adapt_accelerator, arguments_by_name, build_engine
from hfdist.trainer.evaluation.loop import Measure, evaluate, evaluating, sharded_batches
from hfdist.trainer.fault_tolerance.nonfinite_steps import NonfiniteGuard, spread
from hfdist.trainer.fault_tolerance.rank_flags import Agreement
from hfdist.trainer.optimizers import Optimizers
from hfdist.trainer.options import RunOptions
from hfdist.trainer.reporting.throughput import Throughput
from hfdist.trainer.step.lean_step import LeanStep, make_lean_step
from hfdist.trainer.step.loss import Convention, num_input_tokens
from hfdist.trainer.step.loss_convention import ask, names_of_labels
from hfdist.trainer.step.micro_batch import loss_of, weighted_mean
from hfdist.trainer.step.sharded_dataloader import CountingCollator, sharding_each_once
from hfdist.trainer.validation import check_has_logits, check_has_trained, check_trainer, check_trials
from hfdist.watch import watches_among

if TYPE_CHECKING:
    # What the class after the mixin brings along.
    _Trainer = transformers.Trainer
else:
    _Trainer = object


class DistributedTrainerMixin(_Trainer):
    """Gives a Trainer a `strategy`. Put it before the class: `class Mine(DistributedTrainerMixin, trl.SFTTrainer)`.

    Args:
        given, named: as in the original class. `model` is whole, on the CPU (under ZeRO-3: made after the arguments,
            so already cut), `args` are TrainingArguments made with `**strategy.training_arguments()`.
        strategy: the layout; None: everything is as in the original class.
        options: what a run of a recipe asks besides.
    """

    def __init__(
        self, *given: Any, strategy: Strategy | None = None, options: RunOptions | None = None, **named: Any
    ) -> None:
        self.strategy = strategy
        self.options = options or RunOptions()
        self.engine: Engine | None = None
        self.saving: checkpointer.Saving | None = None
        self._lean_step: LeanStep | None = None
        self._predicts = False
        """Whether an evaluation loop is to keep what the model gives."""
        self.measures: list[Measure] = []
        """What each evaluation measures besides the loss."""
        self.convention: Convention | None = None
        """What the loss counts; found out at the first batch. None: not yet, or the class has a loss of its own."""
        self.agreement = Agreement()
        model_init: Any = None
        if strategy is not None:
            named = arguments_by_name(type(self), given, named)
            given, model_init = (), named.get("model_init")
            self.engine, named = build_engine(type(self), strategy, named)
        super().__init__(*given, **named)
        if self.engine is not None:
            # Each training begins with a new model: see `call_model_init`.
            self.model_init = cast(Any, model_init)
            # Tells the original not to wrap the model in DDP.
            self.is_distributed_loading_by_transformers = self.engine.reduces_gradients
            # A loss that is not finite must be seen, and tokens are counted here.
            self.args.logging_nan_inf_filter = False
            self.args.include_num_input_tokens_seen = "no"
            self.throughput = Throughput(self.args.device)
            check_trainer(self, self.engine)
            self._optimizers = Optimizers(self)
            trl_trainers.adapt(self, self.engine)
            self.agreement.listeners.append(checkpointer.SaveListener(self))
            self.add_callback(self.agreement)

    # ---- setting up ----

    @property
    def _sums_targets(self) -> bool:
        """Whether the loss is that of all targets of the global batch, and not a mean of another kind."""
        return trl_trainers.sums_over_targets(type(self))

    def find_convention(self, batch: Any, forward: Forward | None = None) -> Convention:
        """Find out, once, what the loss counts: of batches like this one. A collective.

        Args:
            batch: any one, of this rank.
            forward: runs the model; None: no evaluation goes on.
        """
        if self.convention is None:
            with evaluating(self) if forward is None else nullcontext(forward) as run:
                self.convention = ask(self, run, batch)
            # What `compute_loss` gives is this micro batch's share, whether or not the model divides by itself.
            self.loss_is_scaled_for_ga = True
        return self.convention

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and mend what it does otherwise than a strategy wants."""
        super().create_accelerator_and_postprocess()
        if self.strategy is not None:
            adapt_accelerator(self, self.strategy.topology)

    def call_model_init(self, *more: Any, **named: Any) -> Any:
        """As the original, with an engine of its own for each model."""
        model = super().call_model_init(*more, **named)
        if self.strategy is None:
            return model
        self.engine = self.strategy.build(model)
        return self.engine.model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay on matrices only; under ZeRO-3 the shape of the whole parameter counts."""
        if self.engine is None:
            return super().get_decay_parameter_names(model)
        return [name for name, p in model.named_parameters() if len(getattr(p, "ds_shape", p.shape)) >= 2]

    def predict(self, *more: Any, **named: Any) -> Any:
        """As the original, where each rank can run the model.

        Raises:
            ConfigError: it cannot, and neither can metrics be computed from logits.
        """
        if self.engine is not None:
            check_has_logits(self.engine, "predict()")
        self._predicts = True
        try:
            return super().predict(*more, **named)
        finally:
            self._predicts = False

    def get_total_train_batch_size(self, args: Any) -> int:
        """Sequences of a step over all data ranks; ranks of one model replica share theirs."""
        return (
            super().get_total_train_batch_size(args) if self.strategy is None else self.strategy.batch.global_batch_size
        )

    def get_train_dataloader(self) -> Any:
        """A token stream reads this rank's share by itself: accelerate must not cut it again."""
        if self.strategy is not None and isinstance(self.train_dataset, TokenStream):
            return self.train_dataset.loader(batch_size=self.args.per_device_train_batch_size)
        if self.strategy is None or not self._sums_targets:
            return super().get_train_dataloader()
        with sharding_each_once(self.accelerator, self.strategy.topology, names_of_labels(self)):
            return super().get_train_dataloader()

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> Any:
        more = max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial
        if self.engine is None or resume_from_checkpoint is None:
            return super()._init_training_state(*more)
        with checkpointer.arguments_of(Path(resume_from_checkpoint), self.args):
            begun = super()._init_training_state(*more)
        # Of this training, where the original goes on with those of the checkpoint.
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        return begun

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if self.engine is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # The checkpoint is ours, so the original must not look for its own files.
        with self._optimizers.made_for(self.engine):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        came_from = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._guard = NonfiniteGuard(self, self.options.limits, came_from)
        self.optimizer = self.engine.attach(self.model_wrapped, self.optimizer, self.accelerator.scaler)
        self._optimizers.begin(self.engine)
        inherited = super().training_step, super().compute_loss, super()._clip_grad_norm
        self._lean_step = make_lean_step(self, self.model_wrapped, *inherited)
        self.saving = checkpointer.Saving(self, in_background=self.options.save_in_background)
        if came_from is not None:
            checkpointer.restore(self, came_from)
        elif isinstance(self.train_dataset, TokenStream):
            # A run that was killed before its first checkpoint may have written for it.
            self.train_dataset.cut_ledger()
        self.start_clock()
        return prepared

    def start_clock(self) -> None:
        """Measure the throughput from the present step on."""
        self.throughput.start(
            step=self.state.global_step,
            tokens=self.state.num_input_tokens_seen,
            flops_per_token=self._flops_per_token,
            num_devices=self.args.world_size,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **named: Any) -> Any:
        """As the original; a save that goes on at an error is waited for.

        Raises:
            CheckpointError: there is nothing to go on from, or it is damaged or another program's.
        """
        if resume_from_checkpoint and self.engine is not None:
            resume_from_checkpoint = checkpointer.find_start(self, resume_from_checkpoint)
        with checkpointer.settled(self):
            return super().train(resume_from_checkpoint, *more, **named)

    def _finalize_training(self, *more: Any, **named: Any) -> Any:
        """As the original, once nothing is being saved: its last line and `on_train_end` come behind all others."""
        checkpointer.wait(self)
        return super()._finalize_training(*more, **named)

    def hyperparameter_search(self, *more: Any, **named: Any) -> Any:
        """As the original.

        Raises:
            ConfigError: see `check_trials`.
        """
        if self.engine is not None:
            check_trials(self)
        return super().hyperparameter_search(*more, **named)

    # ---- the step ----

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Let the engine run forward and backward of one micro batch."""
        if self.engine is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self.engine.forward_backward(inputs, num_items_in_batch, self._defaults(model))

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the original; a loss that is not finite makes all gradients so, and by them the other ranks know of it."""
        head = None if return_outputs else self.options.loss_head
        with nullcontext() if head is None else head.deferring(model):
            compute: Callable[..., Any] = partial(super().compute_loss, model, return_outputs=return_outputs)
            if self._lean_step is not None and not return_outputs:
                compute = partial(self._lean_step.loss, model)
            if self.convention is not None and not self.convention.divides and num_items_in_batch is not None:
                compute = partial(weighted_mean, self, compute)
            # By name, as the original calls it: the class after the mixin may take only some of these.
            result = compute(inputs, num_items_in_batch=num_items_in_batch)
        if self.engine is None:
            return result
        return (spread(result[0]), result[1]) if return_outputs else spread(result)

    def _defaults(self, model: nn.Module) -> TrainerHooks:
        return TrainerHooks(
            model=model,
            training_step=super().training_step if self._lean_step is None else self._lean_step.run,
            loss=partial(loss_of, self),
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Targets of the global batch, as the loss counts them; ranks of one model replica read the same batch."""
        num_alike = 1 if self.strategy is None else self.args.world_size // self.strategy.topology.data_size
        if self.engine is None or not self._sums_targets or not batch_samples:
            num_items = super()._get_num_items_in_batch(batch_samples, device)
            return num_items if num_items is None or num_alike == 1 else num_items // num_alike
        convention = self.find_convention(batch_samples[0])
        # Numbers of rows may be on the CPU, and those of targets on the device.
        num_items = torch.stack([convention.weight(batch).to(device) for batch in batch_samples]).sum()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_items = self.accelerator.gather(num_items).sum() // num_alike
        return num_items

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        if self.engine is None:
            super()._sync_replicated_trainable_parameters(model)

    def _run_epoch(self, *more: Any, **named: Any) -> None:
        if self.engine is not None and (
            self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        ):
            # Resumed at its end: an endless stream would otherwise give one step more.
            self.control.should_training_stop = True
            return
        with nullcontext() if self._lean_step is None else self._lean_step.shortcuts():
            super()._run_epoch(*more, **named)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Count the tokens on the way, and stop where the data end. A batch without targets takes no step."""
        for watch in watches_among(self.callback_handler.callbacks):
            epoch_iterator = watch.progress.marking(epoch_iterator)
        read = partial(super().get_batch_samples, epoch_iterator, num_batches, device)
        samples, num_items = read()
        if self.engine is None or self.strategy is None:
            return samples, num_items
        if isinstance(self.train_dataset, TokenStream) and self.train_dataset.may_lack_targets:
            # Agreed by all ranks, since targets are counted over all.
            while num_items == 0:
                if all(gather_json(self.train_dataset.has_ended)):
                    check_has_trained(self.state.global_step)
                    self.control.should_training_stop = True
                    self.control.should_save = self.args.save_strategy != "no" and not checkpointer.is_saved(self)
                    return [], num_items
                samples, num_items = read()
        self.throughput.add(sum(num_input_tokens(batch) for batch in samples) * self.strategy.topology.data_size)
        # Where batches are no tokens, as those of rewards, the class may count for itself.
        self.state.num_input_tokens_seen = self.throughput.tokens or self.state.num_input_tokens_seen
        self._guard.begin_step()
        return samples, num_items

    def floating_point_ops(self, inputs: Batch) -> int:
        """By the documented formula, counted once: the original counts all parameters at every micro batch."""
        num_tokens = num_input_tokens(inputs)
        if self.engine is None or not isinstance(self.model, PreTrainedModel) or num_tokens == 0:
            return super().floating_point_ops(inputs)
        return round(self.throughput.flops_per_token(inputs["input_ids"].shape[-1]) * num_tokens)

    def _flops_per_token(self, sequence_length: int) -> float:
        assert self.engine is not None
        return flops_per_token(cast(PreTrainedModel, self.model).config, self.engine.size, sequence_length)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        default = partial(super()._clip_grad_norm, model) if self._lean_step is None else self._lean_step.clip
        if self.engine is None:
            return default()
        return self.engine.clip_grad_norm(self.args.max_grad_norm, default)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last hook before the optimizer's step."""
        if self.engine is None:
            return super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            grad_norm = self.engine.clip_grad_norm(0.0, partial(super()._get_grad_norm, model))
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._guard.judge(grad_norm)
        return grad_norm

    def _maybe_log_save_evaluate(self, *more: Any, **named: Any) -> None:
        if self.engine is None or not self._guard.end_step():
            super()._maybe_log_save_evaluate(*more, **named)

    def log(self, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Add tokens, tokens/s, seconds a step and MFU to each training line, for all trackers alike."""
        if self.engine is not None:
            if "loss" in logs:
                logs |= self.throughput.read(self.state.global_step)
            if any(name == "loss" or name.endswith("_loss") for name in logs):
                trl_trainers.share_metrics(self, self.engine)
        super().log(logs, *more, **named)
        if self.options.run_values is not None:
            # A run logs each step: in a million of them that is half a GB of memory, and with many saves more.
            drop_old(self.state.log_history)

    # ---- evaluation ----

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Deal the held-out items over the data ranks, with equally many batches on each."""
        if self.strategy is None or self.compute_metrics is not None or not self._sums_targets:
            return super().get_eval_dataloader(eval_dataset)
        own: Any = self.eval_dataset
        if eval_dataset is not None:
            own = own[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        if own is None:
            raise ConfigError(
                "there is nothing to evaluate on",
                where="eval_dataset",
                found="None",
                hint="evaluate(eval_dataset), or eval_dataset=... for the trainer",
            )
        collate = self._get_collator_with_removed_columns(self.data_collator, description="evaluation")
        return sharded_batches(
            own,
            topology=self.strategy.topology,
            micro_batch_size=self.args.per_device_eval_batch_size,
            collator=CountingCollator(collate, names_of_labels(self)),
        )

    def evaluation_loop(self, dataloader: Any, *more: Any, **named: Any) -> EvalLoopOutput:
        """Mean loss of all held-out tokens: neither the batch size nor the number of ranks changes it."""
        if self.engine is None:
            return super().evaluation_loop(dataloader, *more, **named)
        with self._optimizers.evaluating(self.engine):
            if self.compute_metrics is not None or not self._sums_targets or self._predicts:
                return super().evaluation_loop(dataloader, *more, **named)
            return evaluate(self, dataloader, named.get("metric_key_prefix", "eval"))

    # ---- saving and resuming ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.engine is None:
            super()._save_checkpoint(model, trial)
            return
        with self.throughput.paused():
            checkpointer.save(self)
            if checkpointer.is_awaited(self):
                checkpointer.wait(self)

    def save_model(self, *given: Any, **named: Any) -> None:
        """Write a Hub folder; no rank needs to hold the whole model. Call it on all ranks."""
        if self.engine is None:
            super().save_model(*given, **named)
            return
        output_dir = named.get("output_dir", given[0] if given else None)
        with self._optimizers.evaluating(self.engine):
            checkpointer.export(self, Path(str(output_dir or self.args.output_dir)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # With an engine, weights are read together with the optimizer's state, once both exist.
        if self.engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.engine is None:
            super()._load_best_model()
        else:
            checkpointer.restore_best(self)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called once the batches of an epoch that were done are skipped, which draws random numbers."""
        if self.engine is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            restore_random_state(Path(checkpoint))


class Trainer(DistributedTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with a `strategy`."""
