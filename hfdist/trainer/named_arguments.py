"""Positional arguments of a Trainer's constructor, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from inspect import Parameter, Signature

from hfdist.errors import ConfigError, first_line
from hfdist.trainer.hooks import OURS


def arguments_by_name(kind: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Name the positional arguments of the class after the mixin: `args` comes second in most, but not in all.

    A ConfigError says that its constructor only passes on what it is given.
    """
    signature = _first_signature(kind)
    if signature is not None:
        arguments = _bind(signature, kind, args, kwargs)
        if arguments is not None:
            return arguments
    what, found = "it cannot be told which of these arguments is the model", f"{len(args)} arguments without a name"
    raise ConfigError(what, where=f"{kind.__name__}(...)", found=found, hint="model=..., args=..., and so on")


def _first_signature(kind: type) -> Signature | None:
    """Give the signature of the first constructor after the mixin that names an argument; None: there is none."""
    classes = kind.__mro__
    mixin = next(place for place, owner in enumerate(classes) if owner.__module__ in OURS)
    for owner in classes[mixin:]:
        if owner.__module__ not in OURS and "__init__" in vars(owner):
            signature = inspect.signature(vars(owner)["__init__"])
            if _named(signature):
                return signature
    return None


def _named(signature: Signature) -> list[str]:
    """Give the names of the arguments of a method."""
    of_many = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p.name for p in list(signature.parameters.values())[1:] if p.kind not in of_many]


def _bind(
    signature: Signature, kind: type, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object] | None:
    """Name the arguments; None: some have no name in this signature either."""
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        hint = "processing_class=TOKENIZER" if "'tokenizer'" in str(error) else None
        where, allowed = f"{kind.__name__}(...)", ", ".join(_named(signature))
        raise ConfigError(first_line(error), where=where, allowed=allowed, hint=hint) from error
    _, *given = bound.arguments.items()
    arguments = dict(given)
    names = {p.kind: p.name for p in signature.parameters.values()}
    # First: an argument in `**kwargs` may have the name of `*args`, as a Trainer's `args` has.
    without_names = arguments.pop(names.get(Parameter.VAR_POSITIONAL, ""), ())
    arguments |= arguments.pop(names.get(Parameter.VAR_KEYWORD, ""), {})
    return None if without_names else arguments
