"""The Trainer's own step without what it asks anew at every micro batch: the same operations, hence the same bits.

transformers and accelerate look up at each step what cannot change while a model is trained: which optimizers are
installed (on the disk), whether the process runs under SageMaker, which of the gradients are DTensors. For a small
model, or many micro batches, that is a fifth of a step. Where a class overrides a hook of the step, or anything else
is unusual, the original runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter, is_
from types import ModuleType
from typing import Any, cast

import accelerate.accelerator
import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, is_lomo_available
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from transformers.utils.import_utils import is_sagemaker_mp_enabled

from hfdist.strategies.base import Batch
from hfdist.trainer.step.loss import num_losses
from hfdist.trainer.training import Training

ComputeLoss = Callable[..., Any]
"""`Trainer.compute_loss`: it gives the loss, or the loss and the outputs."""
_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_HOOKS = (
    "_prepare_context_parallel_inputs",
    "_prepare_inputs",
    "_prepare_input",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_has_mixed_mesh_grads",
)
"""What the original step calls besides `compute_loss`, which is called here too."""
_is_training = attrgetter("training")


class LeanStep:
    """Micro batches and clipping of one training; see `make`."""

    @classmethod
    def make(cls, training: Training, model: nn.Module, compute_loss: ComputeLoss) -> LeanStep | None:
        """Make it where nothing is unusual, once the optimizer is ready; otherwise None.

        It takes the place of `transformers.Trainer`'s own `training_step` and `_clip_grad_norm`, where those of a class
        end. `compute_loss`: of the class after the mixin.
        """
        args, accelerator, optimizer = training.args, training.accelerator, training.optimizer
        of_trainer = [getattr(training.trainer, name) for name in _HOOKS]
        of_accelerator = [accelerator.backward, accelerator.clip_grad_norm_]
        is_plain = (
            all(_is_untouched(method, transformers.trainer) for method in of_trainer)
            and all(_is_untouched(method, accelerate.accelerator) for method in of_accelerator)
            and not is_sagemaker_mp_enabled()
            and accelerator.distributed_type in _PLAIN
            and accelerator.gradient_accumulation_steps == 1
            and getattr(accelerator, "parallelism_config", None) is None
            and isinstance(optimizer, AcceleratedOptimizer)
            # Those without a schedule want to be told, and LOMO's steps are in the backward.
            and not hasattr(optimizer.optimizer, "train")
            and not is_lomo_available()
            and args.n_gpu <= 1
            and args.torch_empty_cache_steps is None
            and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        )
        return cls(training, model, compute_loss) if is_plain else None

    def __init__(self, training: Training, model: nn.Module, compute_loss: ComputeLoss) -> None:
        self._training, self._model = training, model
        self._device = training.args.device
        self._scaler = training.accelerator.scaler
        self._compute_loss = compute_loss
        self._has_plain_loss = _is_untouched(compute_loss, transformers.trainer)
        # Gradients are averaged over the processes, and the targets are counted over all.
        is_counted_over_all = training.args.average_tokens_across_devices
        self._num_averaged = num_losses(training.trainer) if is_counted_over_all else 1
        self._gradients = Gradients(model)
        self._list_parts()

    def _list_parts(self) -> None:
        self._modules = list(self._model.modules())
        self._gradients.parameters = list(self._model.parameters())
        self._trained = self._list_trained()

    def _list_trained(self) -> list[torch.Tensor]:
        return [parameter for group in self._training.optimizer.param_groups for parameter in group["params"]]

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run forward and backward of one micro batch, and give its detached loss; `Trainer.training_step`."""
        trainer = self._training.trainer
        # Some may be in evaluation although the model is not: a callback may have put them there.
        if not all(map(_is_training, self._modules)):
            model.train()
        loss = cast(torch.Tensor, trainer.compute_loss(model, self._on_device(inputs), num_items_in_batch=num_items))
        del inputs
        if not self._is_divided(num_items):
            loss = loss / trainer.current_gradient_accumulation_steps
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()

    def compute_loss(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Give the loss of a micro batch that is on its device; `Trainer.compute_loss`."""
        trainer = self._training.trainer
        is_plain = self._has_plain_loss and trainer.compute_loss_func is None and trainer.label_smoother is None
        if not is_plain:
            return cast(torch.Tensor, self._compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
        is_counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch) if is_counted else model(**inputs)
        if isinstance(outputs, dict) and "loss" not in outputs:
            # For its error message.
            self._compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        if is_counted and self._num_averaged != 1:
            loss *= self._num_averaged
        return loss

    def _on_device(self, inputs: Batch) -> Batch:
        moved: Batch = {}
        for name, value in inputs.items() if type(inputs) is dict else ():
            if type(value) is not torch.Tensor:
                moved = {}
                break
            moved[name] = value.to(self._device)
        # The original searches what is nested, or of a type of its own.
        return moved or cast(Batch, self._training.trainer._prepare_inputs(inputs))

    def _is_divided(self, num_items: object) -> bool:
        trainer = self._training.trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None

    def clip_grad_norm(self) -> torch.Tensor:
        """Clip to `args.max_grad_norm`, and give the norm before; `Trainer._clip_grad_norm`."""
        trained = self._list_trained()
        if len(trained) != len(self._trained) or not all(map(is_, trained, self._trained)):
            # A callback has given the optimizer others.
            self._list_parts()
        if self._scaler is not None:
            self._training.accelerator.unscale_gradients()
        return clip_grad_norm_(self._gradients.parameters, self._training.args.max_grad_norm)

    @contextmanager
    def shortcuts(self) -> Iterator[None]:
        """For one epoch, let what the Trainer's loop calls by itself not look for what is known here."""
        model, accelerator = vars(self._model), vars(self._training.accelerator)
        with ExitStack() as stack:
            if type(self._model).zero_grad is nn.Module.zero_grad and "zero_grad" not in model:
                model["zero_grad"] = self._gradients.zero_grad
                stack.callback(model.pop, "zero_grad")
            if "no_sync" not in accelerator:
                accelerator["no_sync"] = _no_sync
                stack.callback(accelerator.pop, "no_sync")
            yield


def _no_sync(model: nn.Module) -> AbstractContextManager[object]:
    """`Accelerator.no_sync`, which reads environment variables at each micro batch."""
    # A DDP model that is compiled as a whole hands it on.
    return cast(AbstractContextManager[object], getattr(model, "no_sync", nullcontext)())


class Gradients:
    """Clears the gradients of a model; knows nothing else, since a copy of the model takes a copy of this along."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters: list[nn.Parameter] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`nn.Module.zero_grad`."""
        if not set_to_none:
            nn.Module.zero_grad(self._model, set_to_none=False)
            return
        for parameter in self.parameters:
            parameter.grad = None


def _is_untouched(method: Callable[..., object], home: ModuleType) -> bool:
    """Whether it is what its module defines: no override, and nothing that was put in its place at run time."""
    return getattr(getattr(method, "__func__", None), "__globals__", None) is vars(home)


class LeanOptimizer(AcceleratedOptimizer):
    """Steps without looking, twice a step, for an optimizer's package on the disk."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step at the end of a global batch."""
        if self.gradient_state.sync_gradients:
            self.optimizer.step(closure)


def prepare_optimizer(accelerator: Accelerator, optimizer: object, device_placement: bool | None = None) -> object:
    """`Accelerator.prepare_optimizer`, with a `LeanOptimizer` where nothing is unusual."""
    prepared = Accelerator.prepare_optimizer(accelerator, optimizer, device_placement)
    is_plain = accelerator.distributed_type in _PLAIN and accelerator.scaler is None and not is_lomo_available()
    if is_plain and prepared is not optimizer and type(prepared) is AcceleratedOptimizer:
        prepared.__class__ = LeanOptimizer
    return prepared
