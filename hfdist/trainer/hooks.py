"""Which hooks of the Trainer a class overrides itself, and which of these a strategy never calls: refused by name."""

from __future__ import annotations

import transformers

from hfdist.errors import ConfigError
from hfdist.topology import Topology

OURS = ("hfdist.trainer.trainer", "hfdist.trainer.engine_trainer")
"""Modules of hfdist's own classes in the order of methods: the mixin, and what it puts under the user's class."""
_WEIGHTS = "all ranks write weights together, each its own part"
_STATE = "a checkpoint has this state by the parameters' names, for each layout"
_ADD = "save_model overridden, which adds files to each checkpoint"
NEVER_CALLED = {
    "_save": (_WEIGHTS, _ADD),
    "_save_optimizer_and_scheduler": (_STATE, _ADD),
    "_save_scaler": (_STATE, _ADD),
    "_save_rng_state": (_STATE, _ADD),
    "_load_optimizer_and_scheduler": (_STATE, "on_train_begin of a callback"),
    "_load_scaler": (_STATE, "on_train_begin of a callback"),
    "_issue_warnings_after_load": (_STATE, "on_train_begin of a callback"),
    "_prepare_context_parallel_inputs": ("the layout shares sequences out", "make_strategy(..., context=N)"),
    "_has_mixed_mesh_grads": ("the layout knows which gradients a rank has", "_clip_grad_norm overridden"),
}
"""Hooks that only the original's own checkpoints and step call: why, and what to do instead."""


def owner_of(kind: type, hook: str) -> type:
    """Give the class whose method this is, but for hfdist's own; `transformers.Trainer` if none overrides it."""
    return next(owner for owner in kind.__mro__ if hook in vars(owner) and owner.__module__ not in OURS)


def overrides(kind: type, hook: str) -> bool:
    """Whether a class of the user's overrides this hook; what classes of TRL do there is known."""
    owner = owner_of(kind, hook)
    return owner is not transformers.Trainer and not is_of_trl(owner)


def is_of_trl(owner: type) -> bool:
    """Whether it is a class of TRL's."""
    return owner.__module__.partition(".")[0] == "trl"


def check_hooks(kind: type, topology: Topology) -> None:
    """Check what a class overrides.

    Raises:
        ConfigError: it overrides a hook that is not called in this layout.
    """
    _check_order(kind)
    for hook, (reason, hint) in NEVER_CALLED.items():
        if overrides(kind, hook):
            _refuse(kind, hook, reason, hint)
    if overrides(kind, "prediction_step") and topology.model > 1:
        reason = "it is called with whole outputs of the model, and no rank has them, or several have the same"
        _refuse(kind, "prediction_step", reason, "without it, or a strategy such as zero3 or fsdp2 alone")


def _refuse(kind: type, hook: str, reason: str, hint: str) -> None:
    what, found = f"with a strategy this method is not called: {reason}", f"that of {owner_of(kind, hook).__name__}"
    raise ConfigError(what, where=f"{kind.__name__}.{hook}", found=found, hint=hint)


def _check_order(kind: type) -> None:
    classes = kind.__mro__
    last_own = max(place for place, owner in enumerate(classes) if owner.__module__ in OURS)
    hidden = classes[last_own + 1]
    if hidden is not transformers.Trainer:
        what = "hfdist.Trainer comes before this class and hides its methods"
        hint = f"class {kind.__name__}(hfdist.DistributedTrainerMixin, {hidden.__name__})"
        raise ConfigError(what, where=kind.__name__, found=hidden.__name__, hint=hint)
