"""Checks `model.*`, and the tokenizer that goes with it."""

from __future__ import annotations

import os

from hfdist.config.checks.conflict import conflict
from hfdist.config.data import SourceKind
from hfdist.config.model import Init
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError


def check_model(config: RunConfig) -> None:
    """Raise a ConfigError on a model that is not named, or twice, and on weights without their tokenizer."""
    model, both = config.model, "model.name, model.type"
    if model.name is None and model.type is None:
        allowed = "a Hub id or folder in model.name, or an architecture in model.type"
        hint = "model=HuggingFaceTB/SmolLM2-135M, model=FOLDER, or model=small, which begins with random weights"
        raise ConfigError("no model is named", where=both, found="both null", allowed=allowed, hint=hint)
    if model.name is not None and model.type is not None:
        what = "two models are named: the architecture of a model.name is known, so it takes no model.type"
        is_path = "/" in model.name or os.path.exists(model.name) or model.name.endswith(".gguf")
        hint = f"model=hub model.name={model.name}" if is_path else f"model={model.name} model.name=null"
        hint = f"{hint}, or model.name=null for a model that begins with random weights"
        raise ConfigError(what, where=both, found=f"{model.name} and {model.type}", hint=hint)
    if model.gguf_file is not None and (model.name is None or not model.gguf_file.endswith(".gguf")):
        what = "a GGUF file lies in a repository or folder, which model.name gives"
        file = model.gguf_file if model.gguf_file.endswith(".gguf") else "NAME.gguf"
        hint = f"model=OWNER/NAME model.gguf_file={file}, or model=FOLDER/{file} model.gguf_file=null"
        allowed = "NAME.gguf, with a model.name"
        raise conflict(config, "model.gguf_file model.name", what, allowed=allowed, hint=hint)
    if model.init is not Init.pretrained:
        return
    if model.name is None:
        what = "pretrained weights need the name of a model"
        hint = "model=hub model.name=HuggingFaceTB/SmolLM2-135M, or model.init=random"
        raise conflict(config, "model.init model.type", what, allowed="random", hint=hint)
    if model.tokenizer.name is None:
        what = "pretrained weights need their own tokenizer: one trained on the corpus gives the tokens other ids"
        raise conflict(config, "model.tokenizer.name", what, hint=f"model.tokenizer.name={model.name}")


def check_tokens(config: RunConfig) -> None:
    """Tokens mean nothing without the tokenizer that made them."""
    for section in ("sources", "eval_sources"):
        for name, source in getattr(config.data, section).items():
            # A file is refused for what it is, with its path.
            is_folder = source.path is None or not os.path.isfile(source.path)
            if source.kind is SourceKind.tokens and config.model.tokenizer.name is None and is_folder:
                what = "a source of tokens needs the tokenizer that made them"
                found = f"data.{section}.{name}.kind=tokens"
                hint = f"model.tokenizer.name={source.path}/tokenizer"
                raise ConfigError(what, where="model.tokenizer.name", found=f"null, with {found}", hint=hint)
