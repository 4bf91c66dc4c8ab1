"""The Trainer under a user's class: what an engine does in place of transformers, where `super()` of an override ends.

`DistributedTrainerMixin` puts it between the class that it is mixed into and `transformers.Trainer`. So a class that
overrides a hook is called first, in every layout, as it is without a strategy.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput

from hfdist.checkpoint import restore_random_state
from hfdist.collectives import gather_json, on_rank_zero
from hfdist.config.data import Packing
from hfdist.errors import ConfigError
from hfdist.models.flops import flops_per_token
from hfdist.strategies.base import Strategy
from hfdist.strategies.engine import Batch, Engine, Forward, TrainerHooks
from hfdist.trainer import trl_trainers
from hfdist.trainer.evaluation.loop import Evaluator
from hfdist.trainer.hooks import owner_of
from hfdist.trainer.run_options import RunOptions
from hfdist.trainer.step.convention import Convention, num_input_tokens
from hfdist.trainer.step.find_convention import find_convention
from hfdist.trainer.step.forwards import evaluating
from hfdist.trainer.step.loss import WeightedLoss, num_losses
from hfdist.trainer.step.router_loss import RouterLoss
from hfdist.trainer.training import Training

if TYPE_CHECKING:
    from hfdist.trainer.checkpointing.checkpointer import Checkpointer
    from hfdist.trainer.optimizers import Optimizers
    from hfdist.trainer.step.throughput import Throughput


class EngineTrainer(transformers.Trainer):
    """`transformers.Trainer`; where there is an engine, each method here lets it do that part of the work.

    The mixin's constructor sets all attributes.
    """

    strategy: Strategy | None
    options: RunOptions
    training: Training
    """The handle that the Trainer's parts share."""
    checkpointer: Checkpointer
    weighted_loss: WeightedLoss
    router_loss: RouterLoss
    throughput: Throughput
    _evaluator: Evaluator
    _optimizers: Optimizers
    _predicts: bool
    """Whether an evaluation loop must keep the outputs of the model."""
    _steps_run: set[str]
    """Names of the methods by which the engine has done its parts of this step."""
    _counts_rows = True
    """Whether the tokens of a batch are those of its rows, with what fills up; an objective counts in its own way."""
    _norm: object
    """The norm that the last `_clip_grad_norm` has found."""
    _trained: list[tuple[nn.Parameter, bool]]
    """Each parameter, and whether it was trained when the optimizer was made; empty before the first training."""

    @property
    def engine(self) -> Engine | None:
        """The engine of the model; None: there is no strategy."""
        return self.training.made_engine

    @property
    def _engine(self) -> Engine:
        """The engine, where there is one for certain."""
        return self.training.engine

    @cached_property
    def _sums_targets(self) -> bool:
        """Whether the loss is a sum over all targets of the global batch, divided by their number; not another mean."""
        return trl_trainers.sums_over_targets(type(self))

    def find_convention(self, batch: Batch, forward: Forward | None = None) -> Convention:
        """Find out, once, what the loss of batches like this one counts. A collective.

        `forward` runs the model in evaluation mode; None: no evaluation is running, so this method makes it.
        """
        found = self.weighted_loss.convention
        if found is None:
            with evaluating(self.training) if forward is None else nullcontext(forward) as run:
                found = self.weighted_loss.convention = find_convention(self.weighted_loss, self.training, batch, run)
            # `compute_loss` returns this micro batch's share of the loss, whether or not the model itself divides.
            self.loss_is_scaled_for_ga = True
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Name the parameters with weight decay: matrices only."""
        if self.engine is None:
            return super().get_decay_parameter_names(model)
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Give the sequences of a step over all data ranks; the ranks of a model replica read the same sequences."""
        if self.strategy is None:
            return super().get_total_train_batch_size(args)
        return self.strategy.batch.global_batch_size

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[Any] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if self.strategy is not None and isinstance(sampler, LengthGroupedSampler):
            # The rows of a step, over all ranks: else each layout would have groups of its own.
            sampler.batch_size = self.strategy.batch.global_batch_size
        return sampler

    # ---- the step ----

    def hooks(self, model: nn.Module) -> TrainerHooks:
        """Give the functions of this Trainer that an engine may call, for the model as accelerate prepared it."""
        loss, router_loss = self.weighted_loss.of_micro_batch, self.router_loss.take
        return TrainerHooks(model=model, loss=loss, backward=self._backward, router_loss=router_loss)

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Let the engine run forward and backward of one micro batch."""
        if self.engine is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if "training_step" not in self._steps_run:
            self._steps_run.add("training_step")
            self._check_trained()
        # Schedule-free optimizers must be told, whatever a callback has told them.
        cast(AcceleratedOptimizer, self.optimizer).train()
        hooks = self.hooks(model)
        with self.router_loss.training(hooks):
            return self.engine.forward_backward(inputs, num_items_in_batch, hooks)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the original's loss; with one process, without a kernel that multiplies it by 1."""
        is_own = self.compute_loss_func is None and self.label_smoother is None and self.training.num_gpus <= 1
        # Nothing was put in its place at run time.
        is_original = getattr(transformers.Trainer.compute_loss, "__globals__", None) is vars(transformers.trainer)
        if self.engine is None or return_outputs or not (is_own and is_original):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch) if is_counted else model(**inputs)
        if isinstance(outputs, dict) and "loss" not in outputs:
            # The original raises the error.
            return super().compute_loss(model, inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        # Gradients are averaged over the processes, and the targets are counted over all.
        times = num_losses(self) if is_counted and self.args.average_tokens_across_devices else 1
        return loss if times == 1 else loss * times

    def _backward(self, loss: torch.Tensor) -> None:
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        scaler = self.accelerator.scaler
        if self.accelerator.distributed_type is DistributedType.DEEPSPEED:
            self.accelerator.backward(loss, scale_wrt_gas=False)
        elif getattr(self.accelerator.backward, "__func__", None) is not Accelerator.backward:
            # A user's program has put its own in place of the original.
            self.accelerator.backward(loss)
        else:
            # accelerate's would divide by 1, as the Trainer has accumulated: a hundredth of a small step.
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward()

    def _check_trained(self) -> None:
        """Check that nothing was frozen or thawed since the optimizer was made: layouts would do different things.

        Raises:
            ConfigError: a callback did so.
        """
        changed = next((one for one, was_trained in self._trained if one.requires_grad != was_trained), None)
        if changed is None:
            return
        names = {id(parameter): name for name, parameter in cast(nn.Module, self.model).named_parameters()}
        what = "a parameter was frozen or unfrozen after the optimizer was made, which has it or not, as do the ranks"
        found = f"{names.get(id(changed))}, now with requires_grad={changed.requires_grad}"
        hint = "set requires_grad before trainer.train(), and train again for another choice"
        raise ConfigError(what, where="callbacks", found=found, hint=hint)

    def get_tp_size(self) -> int:
        """Give the number of ranks that compute one loss together: the original counts a loss once for such a group."""
        return super().get_tp_size() if self.strategy is None else self.strategy.topology.tensor

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | int | None:
        """Count the targets of the global batch as the loss does; the ranks of a model replica read the same batch."""
        if self.strategy is None or self.engine is None or not self._sums_targets or not batch_samples:
            num_items = super()._get_num_items_in_batch(batch_samples, device)
            # Ranks of a model replica count the same targets; the original divides by the tensor ranks alone.
            num_alike = 1 if self.strategy is None else self.strategy.topology.model // self.get_tp_size()
            return num_items if num_items is None or num_alike == 1 else num_items // num_alike
        convention = self.find_convention(batch_samples[0])
        # A number of rows may be on the CPU, a number of targets on the device.
        num_items = reduce(add, [convention.weight(batch).to(device) for batch in batch_samples])
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            num_items = self.accelerator.gather(num_items).sum() // self.strategy.topology.model
        return num_items

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return super()._defer_fsdp_gradient_reduction() if self.engine is None else self.engine.accumulating()

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        if self.engine is None:
            super()._sync_replicated_trainable_parameters(model)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Use the documented formula, with parameters counted once; the original counts them at every micro batch."""
        num_tokens = num_input_tokens(inputs)
        if self.engine is None or not isinstance(self.model, PreTrainedModel) or num_tokens == 0:
            return super().floating_point_ops(inputs)
        source, objective = inputs["input_ids"].shape[-1], self.options.objective
        target = 0 if objective is None else objective.target_length(inputs)
        return round(self.throughput.flops_per_token(source, target) * num_tokens * (source + target) / source)

    def _agree_on_tokens(self) -> None:
        """Let all ranks have the same number of tokens read. A collective."""
        stream = self.training.stream
        has_equal_rows = stream is not None and stream.images is None and stream.plan.packing is not Packing.none
        if has_equal_rows and self._counts_rows:
            # A stream's rows are of one length already.
            return
        # Each has taken the rows of the others for as long as its own, so the mean is right.
        of_ranks = gather_json(self.throughput.tokens)
        self.throughput.tokens = sum(of_ranks) // len(of_ranks)
        self.state.num_input_tokens_seen = self.throughput.tokens or self.state.num_input_tokens_seen

    def store_flos(self) -> None:
        """Add up the ranks' operations in float64, each model replica's once; the original sums in float32."""
        if self.strategy is None or not dist.is_initialized():
            super().store_flos()
            return
        total = torch.tensor(self.current_flos, dtype=torch.float64, device=self.args.device)
        dist.all_reduce(total)
        self.state.total_flos += total.item() / (self.args.world_size // self.strategy.topology.data)
        self.current_flos = 0

    def _flops_per_token(self, sequence_length: int, target_length: int) -> float:
        config = cast(PreTrainedModel, self.model).config
        return flops_per_token(config, self._engine.size, sequence_length, target_length)

    def _clip_grad_norm(self, model: nn.Module) -> object:
        if self.engine is None:
            return super()._clip_grad_norm(model)
        self._steps_run.add("_clip_grad_norm")
        self._norm = self._take_norm(self.args.max_grad_norm)
        return self._norm

    def _take_norm(self, max_norm: float) -> object:
        """Clip (0: do not), and give the norm before; DeepSpeed has done it in its backward."""
        if self.accelerator.distributed_type is DistributedType.DEEPSPEED:
            return self.accelerator.clip_grad_norm_((), max_norm)
        return self._engine.clip_grad_norm(max_norm)

    def _check_step(self) -> None:
        """Check before the optimizer's step that the class let the engine do what needs all ranks of a model replica.

        Raises:
            ConfigError: an override did it alone.
        """
        assert self.strategy is not None
        done, self._steps_run = self._steps_run, set()
        if not self.strategy.topology.splits_model:
            return
        clips = (self.args.max_grad_norm or 0) > 0
        needed = ["training_step", "_clip_grad_norm"] if clips else ["training_step"]
        for name in needed:
            if name not in done:
                kind = type(self)
                what = "each rank has a part of the model, and this method works on that part as if it were the whole"
                found, hint = f"that of {owner_of(kind, name).__name__}", f"let it call super().{name}(...)"
                raise ConfigError(what, where=f"{kind.__name__}.{name}", found=found, hint=hint)

    # ---- evaluation ----

    @property
    def _evaluates_as_original(self) -> bool:
        """Whether evaluations run transformers' own loop: something needs outputs, or the loss is not hfdist's."""
        is_known = trl_trainers.is_plain_prediction(type(self))
        return self.compute_metrics is not None or not self._sums_targets or self._predicts or not is_known

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Give the mean loss of all held-out tokens; it does not depend on the batch size or the number of ranks."""
        if self.engine is None or self._evaluates_as_original:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        return self._evaluator(dataloader, kwargs.get("metric_key_prefix", "eval"))

    # ---- saving and resuming ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.engine is None:
            super()._save_checkpoint(model, trial)
            return
        with self.throughput.paused():
            self._agree_on_tokens()
            folder = self.checkpointer.save()
            if self.args.push_to_hub or self.checkpointer.is_awaited():
                self.checkpointer.wait()
            if self.args.push_to_hub:
                with _pickled_without_token(type(self.args)):
                    on_rank_zero(partial(self._push_from_checkpoint, str(folder)))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hub folder; no rank needs to hold the whole model. Call it on all ranks."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
        elif not self.checkpointer.files.asks_class:
            with self._optimizers.evaluating(self.engine):
                self.checkpointer.export(Path(str(output_dir or self.args.output_dir)))
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # With an engine, weights are read together with the optimizer's state, once both exist.
        if self.engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self.engine is None:
            super()._load_best_model()
        else:
            self.checkpointer.restore_best()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put random states back: after the finished batches of an epoch are skipped, which draws random numbers."""
        if self.engine is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            restore_random_state(Path(checkpoint))


@contextmanager
def _pickled_without_token(kind: type[TrainingArguments]) -> Iterator[None]:
    """Keep `hub_token` out of the training_args.bin that transformers writes, and uploads, with each pushed save."""

    def reduce_without_token(arguments: TrainingArguments) -> tuple[Any, ...]:
        # What pickle's protocol 2 gives of an object: its maker, the maker's arguments, the state, and more.
        maker, maker_arguments, state, *more = cast(tuple[Any, ...], arguments.__reduce_ex__(2))
        return maker, maker_arguments, {**state, "hub_token": None}, *more

    copyreg.pickle(kind, cast(Any, reduce_without_token))
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]
