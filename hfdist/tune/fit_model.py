"""The changes that all objectives make to a model."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.task import Head
from hfdist.errors import ConfigError
from hfdist.models.dropout import switch_off_dropout
from hfdist.models.encoders import takes_texts_apart
from hfdist.models.positions import counts_from_zero
from hfdist.models.probing import class_keeps_documents_apart


def fit_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, head: Head) -> None:
    """Switch dropout off, in place, and set the tokens of padding and of a target's start, if the model has none.

    Log-probabilities of answers are compared, and dropout would make them differ by chance. Where a text is read by
    itself, as the model's `head` says, nothing is compared, and dropout stays.
    """
    if getattr(model.config, "pad_token_id", 0) is None:
        # A model for sequence classification asks for it.
        own = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.eos_token_id if own is None else own
    if head.is_padded:
        if tokenizer.pad_token is None:
            # Whoever opens the folder gives it several texts at once.
            tokenizer.pad_token_id = model.config.pad_token_id
        if head is Head.targets and model.generation_config.decoder_start_token_id is None:
            # In training such a type begins a target with its last token: mBART, with the language.
            model.generation_config.decoder_start_token_id = tokenizer(text_target="a")["input_ids"][-1]
        return
    switch_off_dropout(model)


def check_fits(model: PreTrainedModel, head: Head) -> None:
    """Check that an objective may pack documents for the model, if it does; ConfigError: as of `check_packable`."""
    if not takes_texts_apart(model, head):
        check_packable(model, where="model.name, model.type")


def check_packable(model: PreTrainedModel, *, where: str) -> None:
    """Raise a ConfigError if packed documents see each other, or if positions do not begin with 0; `where`: the key."""
    if class_keeps_documents_apart(model) is False:
        what = "documents are packed, and this model sees through from one to the next"
        hint = "a model that masks by positions, with model.attention=auto"
        raise ConfigError(what, where=where, found=type(model).__name__, hint=hint)
    if not counts_from_zero(model):
        what = "documents are packed at positions from 0, and this model counts otherwise in one document"
        raise ConfigError(what, where=where, found=type(model).__name__, hint="a model whose positions begin with 0")
