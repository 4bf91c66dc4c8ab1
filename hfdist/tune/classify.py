"""Classification of texts, or of the words of texts, with the losses of transformers' own classes.

A model reads each text in a row of its own. So the forward of its class decides all that comes before the loss:
pooling, dropout, and which token's state a decoder takes. A step's loss is the mean over the global batch's items.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.batch import IGNORED
from hfdist.config.data import LabelsConfig, ProblemType
from hfdist.data.label_tokens import to_classes, to_tags
from hfdist.models.positions import padding_id
from hfdist.strategies.engine import Batch
from hfdist.trainer.step.objective import Objective
from hfdist.trainer.training import Training
from hfdist.tune.labelled_texts import IDS, LABELS, MASK, SEGMENTS, have_labels, take_apart

_TYPES = "token_type_ids"
"""Input of models that tell the first text of a pair from the second."""


class _LabelCounts(NamedTuple):
    """Number of items for each label; shape [labels] each."""

    right: torch.Tensor
    """Items that have the label and were given it."""
    given: torch.Tensor
    """Items that were given the label."""
    wanted: torch.Tensor
    """Items that have the label."""


class TextsWithLabels(Objective):
    """What objectives over texts with labels share: how a model reads the texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._tells_segments = _TYPES in tokenizer.model_input_names

    def begin(self, training: Training) -> None:
        """Find the padding token of the model, and whether the model tells the texts of a pair apart."""
        super().begin(training)
        model = cast(PreTrainedModel, training.model)
        self._padding = padding_id(model) or 0
        takes_segments = _TYPES in inspect.signature(model.forward).parameters
        self._tells_segments = self._tells_segments and takes_segments

    def write_files(self, folder: Path) -> None:
        """Write the padding into the model's config, which an export leaves out where it is the end token.

        Decoders take the state of the last token that is no padding.
        """
        path = folder / "config.json"
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8")) | {"pad_token_id": self._padding}
            path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def prepare(self, batch: Batch) -> Batch:
        """Put each text of a row in a row of its own; a batch whose texts are apart already stays as it is."""
        # `count` comes here with batches that are not prepared yet, and with prepared ones.
        return batch if IDS in batch else take_apart(batch, self._padding)

    def read(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Give the model's logits for a batch from `prepare`, as float32.

        Their shape is [rows, texts, labels], or [rows, texts, tokens, labels] if the model labels words.
        """
        ids = batch[IDS]
        inputs = {"input_ids": ids.flatten(0, 1), "attention_mask": batch[MASK].flatten(0, 1)}
        if self._tells_segments:
            inputs[_TYPES] = batch[SEGMENTS].flatten(0, 1)
        logits: torch.Tensor = model(**inputs)[0]
        return logits.float().view(*ids.shape[:2], *logits.shape[1:])


class Classification(TextsWithLabels):
    """Labels of texts. An item is a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, labels: LabelsConfig) -> None:
        super().__init__(tokenizer)
        self._problem, self._num_labels = labels.problem_type, len(labels.names)
        self._trained_counts: torch.Tensor | None = None
        """`_LabelCounts` of the training as one tensor, since `figures` was called last; shape [3, labels]."""
        self._held_out_counts: torch.Tensor | None = None
        """The same tensor for the held-out set."""
        self.names = () if self._problem is ProblemType.regression else ("accuracy",)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the texts."""
        return have_labels(self.prepare(batch)).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the texts."""
        is_item = have_labels(batch)
        logits = self.read(model, batch)[is_item]
        targets = to_classes(batch[LABELS][is_item], self._problem, self._num_labels)
        match self._problem:
            case ProblemType.regression:
                return mse_loss(logits.squeeze(-1), targets, reduction="sum")
            case ProblemType.multi_label_classification:
                self._note_labels(logits > 0, targets > 0)
                # The mean over the labels of each text, as transformers' class computes it.
                return binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1).sum()
            case _:
                return self._of_one_label(logits, targets)

    def _of_one_label(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum the cross entropies of items; `logits` has shape [items, labels], `targets` [items]."""
        labels = torch.arange(self._num_labels, device=targets.device)
        self._note_labels(logits.argmax(-1, keepdim=True) == labels, targets[:, None] == labels)
        return cross_entropy(logits, targets, reduction="sum")

    def _note_labels(self, given: torch.Tensor, wanted: torch.Tensor) -> None:
        """Count the right labels: `given` are those of the model, `wanted` those of the data; shape [items, labels]."""
        is_right = (given == wanted).all(-1)
        self._note(torch.ones_like(is_right), {"accuracy": is_right.float()})
        counts = _LabelCounts(right=(given & wanted).sum(0), given=given.sum(0), wanted=wanted.sum(0))
        added = torch.stack(counts).double()
        if self._training.model.training:
            self._trained_counts = added if self._trained_counts is None else self._trained_counts + added
        else:
            self._held_out_counts = added if self._held_out_counts is None else self._held_out_counts + added

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Give the accuracy, and the mean of the F1 scores of all labels that occur. A collective."""
        figures = super().figures(trains=trains)
        if self._problem is ProblemType.regression:
            return figures
        counts = self._take_label_counts(trains=trains)
        num_named = counts.given + counts.wanted
        occurs = num_named > 0
        if not bool(occurs.any()):
            return figures
        scores = 2 * counts.right / num_named
        return figures | {"f1": float(scores[occurs].mean())}

    def _take_label_counts(self, *, trains: bool) -> _LabelCounts:
        """Give the counts of all ranks since the last call, and begin anew. A collective."""
        if trains:
            counts, self._trained_counts = self._trained_counts, None
        else:
            counts, self._held_out_counts = self._held_out_counts, None
        if counts is None:
            counts = torch.zeros(3, self._num_labels, dtype=torch.float64, device=self._training.args.device)
        if dist.is_initialized():
            dist.all_reduce(counts)
        return _LabelCounts(*counts)


class TokenClassification(Classification):
    """Labels of words. An item is a word: its first token stands for it."""

    def count(self, batch: Batch) -> torch.Tensor:
        """Count the words that have a label."""
        return (self._tags(self.prepare(batch)) != IGNORED).sum()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Sum the losses of the words."""
        tags = self._tags(batch)
        is_item = tags != IGNORED
        return self._of_one_label(self.read(model, batch)[is_item], tags[is_item])

    def _tags(self, batch: Batch) -> torch.Tensor:
        """Give the tag of each token, IGNORED where it has none; shape [rows, texts, tokens]."""
        return torch.where(have_labels(batch)[..., None], to_tags(batch[LABELS]), IGNORED)
