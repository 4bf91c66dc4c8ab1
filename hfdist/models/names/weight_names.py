"""Compares the names and shapes in a model's files with the model's own, by their headers, before a weight is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from hfdist.config.task import SCORE, Head
from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.units import list_first

_SCORE_PREFIX = f"{SCORE}."
_POOLER_PREFIX = "pooler."
"""What transformers calls the layer over the first token's state, which models for masked tokens lack."""
_NOT_CONVERTED = "issues during automatic conversion of the weights"
"""Words of transformers' message for weights that cannot be converted: the RuntimeError has no class of its own."""
_SHOWN = 3
"""Number of names that a message shows."""


@dataclass(frozen=True)
class NameDifferences:
    """How the names in a model's files differ from the model's own, once transformers has converted and tied them."""

    missing: tuple[str, ...]
    """Weights of the model that no file holds."""
    unexpected: tuple[str, ...]
    """Weights in the files that the model does not have."""
    reshaped: tuple[str, ...] = ()
    """Weights of another shape in the files, each as `NAME: SHAPE IN THE FILE, not SHAPE IN THE MODEL`."""

    @classmethod
    def of(
        cls, loading_info: Mapping[str, Any], model: PreTrainedModel, *, head: Head = Head.tokens
    ) -> NameDifferences:
        """Read the differences off the result of transformers' `from_pretrained(..., output_loading_info=True)`.

        Args:
            loading_info: the second value of the result. Names that transformers itself deems fine are not in it.
            model: the first value of the result.
            head: what the model gives at its end. It decides which differences are none: layers for a score or for
                labels are new, the pooler that some encoders have is new or not used, and a head for tokens may be
                left out.
        """
        missing, unexpected = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
        if head is Head.score:
            missing = [name for name in missing if not name.startswith(_SCORE_PREFIX)]
        prefix = f"{model.base_model_prefix}."
        if head.gives_labels:
            missing = [name for name in missing if name.startswith(prefix)]
        if head in (Head.labels, Head.none):
            missing = [name for name in missing if not name.removeprefix(prefix).startswith(_POOLER_PREFIX)]
        if head not in (Head.tokens, Head.targets):
            unexpected = [name for name in unexpected if name.startswith(prefix)]
        if head is Head.masked:
            unexpected = [name for name in unexpected if not name.removeprefix(prefix).startswith(_POOLER_PREFIX)]
        shapes = sorted(loading_info["mismatched_keys"])
        reshaped = tuple(f"{name}: {list(in_file)}, not {list(in_model)}" for name, in_file, in_model in shapes)
        return cls(tuple(missing), tuple(unexpected), reshaped)

    def check(self, *, where: str, name: str, may_differ: bool = False, hint: str | None = None) -> None:
        """Refuse differences of names or shapes.

        Args:
            where: the key that names the model.
            name: the model, as the user named it.
            may_differ: whether names may be missing or unexpected; other shapes are refused all the same.
            hint: what may be done about missing and unexpected names.

        Raises:
            ConfigError: names or shapes differ.
        """
        if self.reshaped:
            raise ConfigError(
                f"{len(self.reshaped)} of its weights have other shapes than those of the model",
                where=where,
                found=(name, *list(self.reshaped)[:_SHOWN]),
                hint="without model.config.*, and with as many data.labels.names as it has, they are the same",
            )
        if may_differ or not (self.missing or self.unexpected):
            return
        raise ConfigError(
            "the weights in its files are not those of the model",
            where=where,
            found=(
                name,
                f"missing: {len(self.missing)}{_listed(self.missing)}",
                f"unexpected: {len(self.unexpected)}{_listed(self.unexpected)}",
            ),
            allowed="the names that the model's class has, as save_pretrained writes them",
            hint=hint,
        )

    def __str__(self) -> str:
        return (
            f"{len(self.missing)} missing weights are drawn{_listed(self.missing)}; "
            f"{len(self.unexpected)} unexpected ones are left out{_listed(self.unexpected)}"
        )


def read_names(
    auto_class: Any, name: str | Path, *, where: str, head: Head = Head.tokens, **fields: object
) -> NameDifferences:
    """Let transformers open the files of a model, and read nothing but their headers.

    Args:
        auto_class: one of transformers' Auto classes.
        name: the model's folder or Hub id.
        where: the key that names the model, for messages.
        head: what the model gives at its end.
        fields: further arguments of `from_pretrained`.

    Raises:
        ConfigError: the files cannot be read.
        ResourceError: the Hub does not answer.
    """
    # On the meta device a tensor has no values: those of the mapped files are never touched.
    given = fields | {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading_from_hub(where, str(name)), _without_bar(), without_report():
        try:
            model, loading_info = auto_class.from_pretrained(name, **given)
        except RuntimeError as error:
            if _NOT_CONVERTED not in str(error):
                raise
            what = "transformers cannot put the weights in its files together: some are missing, or of other shapes"
            hint = "a file of every expert, and of every part of a weight that the model's class has whole"
            raise ConfigError(what, where=where, found=name, hint=hint) from error
    return NameDifferences.of(loading_info, model, head=head)


@contextmanager
def without_report() -> Iterator[None]:
    """Silence transformers' loading report: names are compared with `NameDifferences`, which knows the model's head."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _without_bar() -> Iterator[None]:
    """Silence transformers' progress bars in this context."""
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if has_bar:
            logging.enable_progress_bar()


def _listed(names: Collection[str]) -> str:
    """Give the first names in brackets, after a space; empty for none."""
    return f" ({list_first(names, _SHOWN)})" if names else ""
