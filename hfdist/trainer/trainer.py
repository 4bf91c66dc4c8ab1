"""The Hugging Face Trainer with an engine under it.

An override either adds what the original does not have (a stream that seeks, checkpoints by name, evaluation
weighted by tokens), or is one line that lets the engine do the step. Without a strategy the Trainer is the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, SaveStrategy, TrainOutput

from hfdist.collectives import gather_json
from hfdist.data import HeldOutSources, TokenStream
from hfdist.errors import ConfigError
from hfdist.models.image_text import reads_images
from hfdist.models.probing import uses_all_parameters
from hfdist.models.router_check import check_router_loss
from hfdist.models.routers import COUNTED, adds_router_loss
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch, Engine
from hfdist.trainer.accelerator import adapt_accelerator
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.checkpointing.log_history import drop_old
from hfdist.trainer.checkpointing.trainer_state import with_intervals_of
from hfdist.trainer.data_errors import check_eval_data, no_step_in_pass, nothing_to_train_on
from hfdist.trainer.engine_setup import build_engine, check_has_logits, distribute, find_strategy
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.evaluation.loop import Evaluator
from hfdist.trainer.fault_tolerance.nonfinite_steps import NonfiniteGuard, propagate_nan
from hfdist.trainer.fault_tolerance.rank_flags import RankFlags
from hfdist.trainer.hooks import owner_of
from hfdist.trainer.island.callback import IslandCallback
from hfdist.trainer.island.make import make_island
from hfdist.trainer.named_arguments import arguments_by_name
from hfdist.trainer.optimizers import Optimizers
from hfdist.trainer.row_check import check_lengths
from hfdist.trainer.run_options import RunOptions
from hfdist.trainer.sft import count_rows, fit_sft, share_metrics
from hfdist.trainer.step.convention import num_input_tokens
from hfdist.trainer.step.lean_callbacks import use_lean_handler
from hfdist.trainer.step.listed_gradients import zeroing_from_list
from hfdist.trainer.step.loss import WeightedLoss, num_losses
from hfdist.trainer.step.objective import Objective, ObjectiveCallback
from hfdist.trainer.step.router_loss import RouterLoss
from hfdist.trainer.step.sharded_dataloader import Dealing, dealing, fill_up_step
from hfdist.trainer.step.throughput import Throughput
from hfdist.trainer.training import Training
from hfdist.trainer.trl_trainers import drop_reference_copy
from hfdist.watch.callback import watches_among

if TYPE_CHECKING:
    # For mypy: the classes after the mixin are Trainers, and end in this one.
    _Trainer = EngineTrainer
else:
    _Trainer = object


_Step = tuple[list[Batch], torch.Tensor | int | None]
"""Micro batches of a step, and the number of targets in its global batch, as transformers returns them.

None: the loss is no sum over targets.
"""


def _check_order(kind: type) -> None:
    """Raise a ConfigError if a class names its Trainer before the mixin, whose overrides would then never run."""
    bases = list(kind.__bases__)
    mixin = next(base for base in bases if issubclass(base, DistributedTrainerMixin))
    if any(issubclass(base, transformers.Trainer) for base in bases[: bases.index(mixin)]):
        what, found = "the mixin comes after the class that it changes", ", ".join(base.__name__ for base in bases)
        right_order = [mixin, *(base for base in bases if base is not mixin)]
        hint = f"class {kind.__name__}({', '.join(base.__name__ for base in right_order)})"
        raise ConfigError(what, where=f"class {kind.__name__}", found=found, hint=hint)


class DistributedTrainerMixin(_Trainer):
    """Gives a Trainer a `strategy`. Put it before the class: `class Mine(DistributedTrainerMixin, trl.SFTTrainer)`.

    "The original" is `transformers.Trainer`; "the class" is what the mixin stands before.

    Args:
        args, kwargs: as in the original class. `model` is whole, on the CPU (under ZeRO-3: made after the arguments,
            so already partitioned), `args` are TrainingArguments made with `**strategy.training_arguments()`.
        strategy: the layout; None: everything is as in the original class.
        options: what the run of a recipe needs in addition.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _check_order(cls)
        if not issubclass(cls, EngineTrainer):
            # EngineTrainer comes last: so overrides of the other classes are called first, and `super()` ends in it.
            others = [base for base in cls.__bases__ if base is not transformers.Trainer]
            cls.__bases__ = (*others, EngineTrainer)

    def __init__(
        self, *args: Any, strategy: Strategy | str | None = None, options: RunOptions | None = None, **kwargs: Any
    ) -> None:
        if strategy is not None:
            kwargs, args = arguments_by_name(type(self), args, kwargs), ()
            strategy, kwargs = find_strategy(strategy, kwargs)
        self.strategy: Strategy | None = strategy
        self.options = options or RunOptions()
        self._make_parts()
        model_init: Any = None
        has_new_adapter = False
        if strategy is not None:
            model_init = kwargs.get("model_init")
            has_new_adapter = kwargs.get("peft_config") is not None
            with self.options.telling():
                self.training.made_engine, kwargs = build_engine(type(self), strategy, kwargs)
        super().__init__(*args, **kwargs)
        if self.engine is None:
            return
        if has_new_adapter:
            drop_reference_copy(self.model)
        # Each training begins with a new model: see `call_model_init`.
        self.model_init = cast(Any, model_init)
        self._fit_to_engine(self.engine)
        self._add_callbacks()

    def _make_parts(self) -> None:
        """Make what the original's constructor needs, as it calls overrides of this class."""
        self.training = Training(
            self,
            self.strategy,
            head=self.options.loss_head,
            hooks=self.hooks,
            # A throughput is made later, once the device is known.
            paused=lambda: self.throughput.paused(),
            restart_figures=self.restart_figures,
        )
        self.checkpointer = Checkpointer(self.training, self.options)
        self.islands: IslandCallback | None = None
        self.weighted_loss = WeightedLoss(self.training)
        self.router_loss = RouterLoss(self.training, self.weighted_loss, sums_targets=self._sums_targets)
        self._evaluator = Evaluator(
            self.training,
            self.weighted_loss,
            self.find_convention,
            objective=self.options.objective,
            measures=self.options.measures,
        )
        self._figures: dict[str, float] = {}
        """Figures for the next training line."""
        self._predicts = False
        self._steps_run, self._norm, self._trained = set(), None, []
        self._num_read = 0
        """Batches that were read in this pass over the data."""
        self._evaluated: object = None
        """The data of the last evaluation."""

    def _fit_to_engine(self, engine: Engine) -> None:
        """Change the settings of the original that do not fit an engine, and check those of the class."""
        # Tells the original not to wrap the model in DDP.
        self.is_distributed_loading_by_transformers = engine.reduces_gradients
        # A loss that is not finite must be seen, and tokens are counted here.
        self.args.logging_nan_inf_filter = False
        self.args.include_num_input_tokens_seen = "no"
        self.throughput = Throughput(self.args.device)
        if self.compute_metrics is not None:
            with self.options.telling():
                check_has_logits(engine, "compute_metrics")
        model = cast(nn.Module, self.model)
        if self._sums_targets and adds_router_loss(model):
            check_router_loss(model)
        self._optimizers = Optimizers(self.training, self.options.base_width)
        if self.options.objective is not None:
            self.weighted_loss.convention = self.options.objective.convention
            self._counts_rows = False
            self.loss_is_scaled_for_ga = True
        fit_sft(self)

    def _add_callbacks(self) -> None:
        use_lean_handler(self.callback_handler)
        self.add_callback(RankFlags([self.checkpointer], self.callback_handler.callbacks))
        if self.options.islands is not None:
            settings, server = self.options.islands, self.options.server_optimizer
            self.islands = make_island(self.training, self.checkpointer, settings, server)
            self.checkpointer.outer = self.islands
            self.add_callback(self.islands)

    @property
    def token_stream(self) -> TokenStream | None:
        """The training data, if they are hfdist's own stream."""
        return self.training.stream

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and change what does not fit the strategy."""
        super().create_accelerator_and_postprocess()
        if self.strategy is not None:
            adapt_accelerator(self.accelerator, self.strategy.topology, self._uses_all_parameters)

    def _uses_all_parameters(self) -> bool:
        """Whether each step's loss is known to need all parameters; False if the arguments decide it."""
        is_ddp = self.accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        is_open = is_ddp and self.args.ddp_find_unused_parameters is None and not self._engine.reduces_gradients
        if not is_open or owner_of(type(self), "compute_loss") is not transformers.Trainer:
            return False
        return isinstance(self.model, PreTrainedModel) and uses_all_parameters(self.model)

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Make a model as the original does, and an engine for it."""
        model = super().call_model_init(*args, **kwargs)
        if self.strategy is None:
            return model
        engine = self.training.made_engine = distribute(type(self), self.strategy, model)
        return engine.model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Name the parameters that decay as the class does, which sees them in their shapes of the whole model."""
        if self.engine is None:
            return super().get_decay_parameter_names(model)
        with self.engine.showing_whole_shapes():
            return super().get_decay_parameter_names(model)

    # ---- a training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as the original does; at an error of hfdist, let a running save end first."""
        with self.options.telling(), self.checkpointer.waiting_at_errors():
            if resume_from_checkpoint and self.engine is not None:
                resume_from_checkpoint = self.checkpointer.folder.find_start(resume_from_checkpoint)
            self._check_lengths()
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_lengths(self) -> None:
        pads = self.data_collator is not transformers.default_data_collator
        reads_itself = owner_of(type(self), "get_train_dataloader") is not transformers.Trainer
        if self.strategy is not None and self.strategy.batch.micro_batch_size > 1 and not (pads or reads_itself):
            check_lengths(self.train_dataset)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as the original does; ConfigError if several ranks save: only rank 0 knows which trial it is."""
        if self.engine is not None and self.args.world_size > 1 and self.args.save_strategy != "no":
            what = "only rank 0 knows the folder of a trial, and each rank writes a part of a checkpoint"
            where = "hyperparameter_search with args.save_strategy"
            found = f"{SaveStrategy(self.args.save_strategy).value}, {self.args.world_size} processes"
            raise ConfigError(what, where=where, found=found, hint="save_strategy='no', or one process a trial")
        return super().hyperparameter_search(*args, **kwargs)

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, resume_from_checkpoint: str | None, trial: object
    ) -> tuple[int, int]:
        args = max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial
        if self.engine is None or resume_from_checkpoint is None:
            return super()._init_training_state(*args)
        with with_intervals_of(Path(resume_from_checkpoint), self.args):
            epochs_trained, steps_in_epoch = super()._init_training_state(*args)
        # The values of this training; the original would keep those of the checkpoint.
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, max_steps)
        if self.token_stream is not None:
            # A stream goes on from its cursor, so there is nothing to skip.
            steps_in_epoch = 0
        return epochs_trained, steps_in_epoch

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> object:
        if self.engine is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # The checkpoint is ours, so the original must not look for its own files.
        with self._optimizers.made_for(self.engine):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        self._guard = self._make_guard(checkpoint)
        self.optimizer = self.engine.setup(self.model_wrapped, self.optimizer, self.accelerator.scaler)
        self._optimizers.begin(self.engine)
        self._trained = [(one, one.requires_grad) for one in cast(nn.Module, self.model).parameters()]
        # After DeepSpeed's hooks, which wrap what a module gives.
        self.router_loss.begin(self.engine.model)
        self.checkpointer.begin()
        if self.options.objective is not None:
            self.options.objective.begin(self.training)
            self.checkpointer.outer = self.options.objective.outer_state()
        if self.islands is not None:
            self.islands.begin()
        if checkpoint is not None:
            self.checkpointer.restore(checkpoint)
        elif self.token_stream is not None and self.token_stream.shares is None:
            # A run that was killed before its first checkpoint may have left records. Those of an island may count.
            self.token_stream.truncate_ledger()
        self.restart_figures()
        return prepared

    def _make_guard(self, came_from: Path | None) -> NonfiniteGuard:
        return NonfiniteGuard(
            self.training,
            self.checkpointer,
            self.options.limits,
            replicas=self.options.replicas,
            came_from=came_from,
            log_skipped=self._log_skipped,
        )

    def _log_skipped(self) -> None:
        """Log the line of a step that no rank has taken. A collective."""
        self.router_loss.skip_step()
        self.read_figures()
        self.log({"loss": cast(float, None), "skipped": True})

    def _run_epoch(self, *args: object, **kwargs: Any) -> None:
        is_over = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if self.engine is not None and is_over:
            # The run is resumed at its last step: an endless stream would give one more step.
            self.control.should_training_stop = True
            return
        self._num_read = 0
        parameters = [parameter for parameter, _ in self._trained]
        with nullcontext() if self.engine is None else zeroing_from_list(kwargs["model"], parameters):
            super()._run_epoch(*args, **kwargs)
        is_resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["steps_trained_in_current_epoch"] > 0
        if self.engine is not None and self._num_read == 0 and not is_resumed:
            raise no_step_in_pass(self.state.global_step)

    def _finalize_training(self, *args: object, **kwargs: object) -> object:
        """Wait for the last save, then end as the original does: its last line and `on_train_end` come last."""
        self.checkpointer.wait()
        share_metrics(self)
        return super()._finalize_training(*args, **kwargs)

    # ---- data ----

    def get_train_dataloader(self) -> Any:
        """Make the loader of this rank: a token stream reads its share itself, so accelerate must not shard it."""
        if self.strategy is not None and self.token_stream is not None:
            return self.token_stream.loader(batch_size=self.args.per_device_train_batch_size)
        with self._dealing(self.args.gradient_accumulation_steps, is_training=True):
            return super().get_train_dataloader()

    @contextmanager
    def _dealing(self, num_microbatches: int, *, is_training: bool) -> Iterator[None]:
        """Let loaders that the class prepares within the block give each data rank its share of the rows."""
        if self.strategy is None:
            yield
            return
        args = self.args
        settings = Dealing(
            topology=self.strategy.topology,
            num_microbatches=num_microbatches,
            label_names=self.weighted_loss.label_names if self._sums_targets else None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            is_training=is_training,
        )
        with dealing(self.accelerator, settings):
            yield

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device) -> _Step:
        """Read the micro batches of a step, and count their tokens and targets.

        Without a micro batch the pass over the data, or the data themselves, have ended.
        """
        for watch in watches_among(self.callback_handler.callbacks):
            epoch_iterator = watch.progress.marking(epoch_iterator)
        if self.engine is not None:
            epoch_iterator = self.throughput.clock.loading(epoch_iterator)
        read = partial(super().get_batch_samples, epoch_iterator, num_batches, device)
        if self.engine is None or self.strategy is None:
            return read()
        samples, num_items = self._read_step(read, num_batches)
        if samples and self.options.objective is not None:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ObjectiveCallback):
                    callback.on_objective(self.state)
            samples = self.options.objective.begin_step(samples, self.hooks(self.model_wrapped))
            num_items = self._get_num_items_in_batch(samples, device)
        if samples:
            self.training.num_targets = num_items
            self._begin_step(samples, num_ranks=self.strategy.topology.data)
        return samples, num_items

    def _read_step(self, read: Callable[[], _Step], num_microbatches: int) -> _Step:
        """Read until there is a target: without one no step is taken."""
        samples, num_items = read()
        # A loader of the class's own may have no length, and so give a step of too few micro batches.
        label_names = self.weighted_loss.label_names if self._sums_targets else None
        samples = fill_up_step(samples, num_microbatches, label_names)
        self._num_read += len(samples)
        stream = self.token_stream
        # All ranks decide the same, because targets are counted over all ranks.
        while stream is not None and stream.may_lack_targets and num_items == 0:
            if all(gather_json(stream.has_ended)):
                self._end_with_data()
                return [], num_items
            samples, num_items = read()
        if not samples:
            # The pass is over; the original would ask once for each step that is left.
            self.control.should_epoch_stop = True
        return samples, num_items

    def _begin_step(self, samples: list[Batch], *, num_ranks: int) -> None:
        """Count what a step reads on so many data ranks, and tell the parts that it begins."""
        objective = self.options.objective
        num_tokens: Callable[[Batch], int] = num_input_tokens if objective is None else objective.num_tokens
        self.throughput.tokens += sum(map(num_tokens, samples)) * num_ranks
        self.throughput.see_documents(batch["position_ids"] for batch in samples if "position_ids" in batch)
        # If batches hold no tokens, as in reward training, the Trainer class may count by itself.
        self.state.num_input_tokens_seen = self.throughput.tokens or self.state.num_input_tokens_seen
        self.router_loss.begin_step(samples)
        self._guard.begin_step()

    def _end_with_data(self) -> None:
        """End the training with a checkpoint: the stream has ended. DataError: it held nothing to train on."""
        if self.state.global_step == 0:
            raise nothing_to_train_on()
        self.control.should_training_stop = True
        self.control.should_save = self.args.save_strategy != "no" and not self.checkpointer.is_saved()

    # ---- a step ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the class's loss; if it is not finite, no gradient is, and the gradients tell the other ranks."""
        # An objective defers the head by itself.
        head = None if return_outputs or self.options.objective is not None else self.options.loss_head
        # Which tokens count for the loss over routers: no input of the model.
        counted = inputs.get(COUNTED)
        if counted is not None:
            inputs = {name: value for name, value in inputs.items() if name != COUNTED}
        self.router_loss.begin_forward(counted)
        with nullcontext() if head is None else head.deferring(model):
            result = self._class_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.engine is None:
            return result
        count_rows(self, inputs, counted)
        loss, *outputs = result if return_outputs else (result,)
        router_loss = self.router_loss.take()
        if router_loss is not None:
            # Gradients are averaged over the processes, and each adds its own share.
            loss = loss + router_loss * num_losses(self)
        return (propagate_nan(loss), *outputs) if return_outputs else propagate_nan(loss)

    def _class_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool, num_items_in_batch: torch.Tensor | int | None
    ) -> Any:
        """Give the share of a micro batch in the step's loss: the objective's, or that of the class and the model."""
        # As keywords, as in the original: an overridden `compute_loss` may take only some of them.
        keywords: dict[str, Any] = {"return_outputs": True} if return_outputs else {}
        compute: Callable[..., Any] = partial(super().compute_loss, model, **keywords)
        if self.options.objective is not None:
            compute = partial(self._objective_loss, self.options.objective, model)
        convention = self.weighted_loss.convention
        if convention is not None and not convention.divides and num_items_in_batch is not None:
            compute = partial(self.weighted_loss.of_mean, compute)
        return compute(inputs, num_items_in_batch=num_items_in_batch)

    def _objective_loss(
        self, objective: Objective, model: nn.Module, inputs: Batch, *, num_items_in_batch: torch.Tensor | int
    ) -> torch.Tensor:
        """Give the share of a micro batch in the mean over the items of the global batch."""
        # Gradients are averaged over the processes, and items are counted over all of them.
        # No item may be left of answers that were all cut off: their sum is 0.
        num_items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        return objective.loss(model, inputs) / num_items * num_losses(self)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> object:
        """Give the norm of the step's gradients, which are final by now; the optimizer's step follows."""
        if self.engine is None:
            return super()._get_grad_norm(model, grad_norm)
        if grad_norm is None:
            # An override may return nothing, and gradients are reduced once.
            grad_norm = self._norm if "_clip_grad_norm" in self._steps_run else self._take_norm(0.0)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._fill_up_gradients()
        self._check_step()
        self._guard.judge(cast("torch.Tensor | float | None", grad_norm))
        return grad_norm

    def _fill_up_gradients(self) -> None:
        """Give what reads images gradients of zeros in a step without an image.

        Ranks that share gradients have zeros there, which change the state of an optimizer. So all layouts do.
        """
        keeps_them_elsewhere = self.accelerator.distributed_type is DistributedType.DEEPSPEED
        if keeps_them_elsewhere or not reads_images(cast(nn.Module, self.model)):
            return
        for parameter, is_trained in self._trained:
            if is_trained and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is not None:
            if self._guard.end_step():
                return
            # The original's own condition, equal on all ranks: figures are read by a collective.
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                self.read_figures()
            if self._guard.was_taken and not self.control.should_save:
                # Not after a skipped step: an optimizer that has not begun would be given a state of zeros.
                self.checkpointer.prepare()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        is_due = self.engine is not None and self.checkpointer.replicates_at(self.state.global_step)
        if is_due and self._guard.is_sound:
            # After the line of this step, which a start from the replica does not write again.
            with self.throughput.paused():
                self.checkpointer.replicate()

    # ---- training lines ----

    def restart_figures(self) -> None:
        """Let the figures of the next training line be of the steps from the present one on."""
        self.router_loss.forget()
        state, num_devices = self.state, self.args.world_size
        self.throughput.start(
            state.global_step, state.num_input_tokens_seen, self._flops_per_token, num_devices=num_devices
        )

    def read_figures(self) -> None:
        """Read what the next training line says of speed, routers and what the run adds. A collective."""
        self._agree_on_tokens()
        self._figures = self.throughput.read(self.state.global_step) | self.router_loss.read() | self.options.figures()
        self._figures |= self.checkpointer.log.replica_figures()
        if self.islands is not None:
            self._figures |= self.islands.figures()
        if self.options.objective is not None:
            self._figures |= self.options.objective.figures(trains=True)
        share_metrics(self)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the figures of hfdist to a training line, for all trackers alike. No collective: one rank may call it."""
        is_training_line = "loss" in logs
        figures = self._figures if is_training_line else {}
        is_due = self.control.should_log
        logs |= figures
        with self.training.without_epoch():
            super().log(logs, *args, **kwargs)
        if figures:
            self._figures = {}
        elif self.engine is not None:
            # The original takes any line for that of the step, which then would be missing on this rank alone.
            self.control.should_log = is_due
        if self.options.is_run:
            # A run logs each step: a million lines take half a GB of memory, and more with many saves.
            drop_old(self.state.log_history)

    # ---- evaluation ----

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> Any:
        """Make the class's loader; rows are dealt to the data ranks, with equally many batches on each."""
        if self.strategy is None or self._evaluates_as_original:
            return super().get_eval_dataloader(eval_dataset)
        data: Any = self.eval_dataset
        if eval_dataset is not None:
            data = data[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        check_eval_data(data, is_needed=owner_of(type(self), "get_eval_dataloader") is transformers.Trainer)
        if not isinstance(eval_dataset, str) and data is not self._evaluated:
            # The original would give the loader of persistent workers again, whatever its data.
            vars(self).get("_eval_dataloaders", {}).pop("eval", None)
            self._evaluated = data
        with self._dealing(1, is_training=False):
            if isinstance(data, HeldOutSources):
                size = self.args.eval_batch_size
                return {name: self._get_dataloader(part, "Evaluation", size) for name, part in data.parts.items()}
            return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: object, **kwargs: object) -> EvalLoopOutput:
        """Evaluate as the class does, on the weights that are to be used: an optimizer may average them."""
        if self.engine is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        with self._optimizers.evaluating(self.engine):
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        # The evaluation's line follows, and rank 0 writes it.
        share_metrics(self)
        return output

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as the original does; ConfigError: no rank has whole logits."""
        if self.engine is not None:
            with self.options.telling():
                check_has_logits(self.engine, "predict()")
        self._predicts = True
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._predicts = False


class Trainer(DistributedTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with a `strategy`."""
