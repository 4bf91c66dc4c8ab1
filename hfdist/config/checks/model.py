"""Checks `model.*`, and the tokenizer that goes with it."""

from __future__ import annotations

import os

from hfdist.config.checks.conflict import conflict
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.data import SourceKind
from hfdist.config.model import Init, ModelConfig
from hfdist.config.override_text import in_shell
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError


def check_model(config: RunConfig) -> None:
    """Raise a ConfigError on no model, on two of them, or on pretrained weights without their tokenizer."""
    _check_is_one(config.model)
    _check_gguf(config)
    if config.model.init is Init.pretrained:
        _check_pretrained(config)


def _check_is_one(model: ModelConfig) -> None:
    where, found = "model.name, model.type", f"{model.name} and {model.type}"
    if model.name is None and model.type is None:
        allowed = "a Hub id or folder in model.name, or an architecture in model.type"
        hint = "model=HuggingFaceTB/SmolLM2-135M, model=FOLDER, or model=small, which begins with random weights"
        raise ConfigError("no model is named", where=where, found="both null", allowed=allowed, hint=hint)
    if model.name is not None and model.type is not None:
        what = "two models are named: the architecture of a model.name is known, so it takes no model.type"
        is_option = model.name in list_options(shipped_folder(), "model")
        hint = f"model={model.name} model.name=null" if is_option else f"model=hub model.name={model.name}"
        hint += ", or model.name=null for a model that begins with random weights"
        raise ConfigError(what, where=where, found=found, hint=hint)


def _check_gguf(config: RunConfig) -> None:
    model = config.model
    if model.gguf_file is not None and (model.name is None or not model.gguf_file.endswith(".gguf")):
        what = "a GGUF file lies in a repository or folder, which model.name gives"
        file = model.gguf_file if model.gguf_file.endswith(".gguf") else "NAME.gguf"
        hint = f"model=OWNER/NAME model.gguf_file={file}, or model=FOLDER/{file} model.gguf_file=null"
        allowed = "NAME.gguf, with a model.name"
        raise conflict(config, "model.gguf_file model.name", what, allowed=allowed, hint=hint)


def _check_pretrained(config: RunConfig) -> None:
    model = config.model
    if model.name is None:
        what = "pretrained weights need the name of a model"
        hint = "model=hub model.name=HuggingFaceTB/SmolLM2-135M, or model.init=random"
        raise conflict(config, "model.init model.type", what, allowed="random", hint=hint)
    if model.tokenizer.name is None:
        what = "pretrained weights need their own tokenizer: one trained on the corpus gives the tokens other ids"
        raise conflict(config, "model.tokenizer.name", what, hint=in_shell("model.tokenizer.name", model.name))


def check_tokens(config: RunConfig) -> None:
    """Raise a ConfigError on a source of tokens without the tokenizer that made them."""
    if config.model.tokenizer.name is not None:
        return
    for key, source in config.data.all_sources.items():
        # The reader of token files refuses a file in place of their folder, and names its path.
        path = source.path
        if source.kind is SourceKind.tokens and path is not None and not os.path.isfile(os.path.expanduser(path)):
            what, found = "a source of tokens needs the tokenizer that made them", f"null, with {key}.kind=tokens"
            hint = in_shell("model.tokenizer.name", f"{path.rstrip('/')}/tokenizer")
            raise ConfigError(what, where="model.tokenizer.name", found=found, hint=hint)
