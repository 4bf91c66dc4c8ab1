"""What a folder of an embedding model holds besides the model, so that sentence-transformers opens it.

modules.json                        Transformer (the folder itself), 1_Pooling, and 2_Normalize where asked
1_Pooling/config.json               last token, mean, or first token
config_sentence_transformers.json   prompts of queries and documents, and the similarity
tokenizer.json                      ends each text with the end token, as in training; AutoTokenizer does so, too
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfdist.config.data import TextsConfig
from hfdist.config.task import Pooling, TaskConfig
from hfdist.data.tokenization.text_encoder import Encoder
from hfdist.errors import ConfigError

_SAMPLE = "A query of some words."
_POOLING = "1_Pooling/config.json"
_LARGE = 1 << 16
"""Bytes of such a file; they have some hundreds."""
_MODE = "pooling_mode_"
_NAMES = {
    Pooling.last: ("lasttoken",),
    Pooling.mean: ("mean_tokens", "mean"),
    Pooling.cls: ("cls_token", "cls"),
}
"""What sentence-transformers calls each: as fields that are true, and in later versions as one value."""
_TYPES = "sentence_transformers.models."
"""Where the modules are in all versions of sentence-transformers; later ones have them elsewhere, too."""


def read_pooling(folder: Path) -> Pooling | None:
    """Give the pooling of a folder of sentence-transformers; None: it says none.

    Raises:
        ConfigError: it pools in a way that is not trained here.
    """
    file = folder / _POOLING
    try:
        if not file.is_file() or file.stat().st_size > _LARGE:
            return None
        values = json.loads(file.read_bytes())
        modes = {name for name, value in values.items() if name.startswith(_MODE) and value is True}
        if isinstance(values.get("pooling_mode"), str):
            modes = {_MODE + values["pooling_mode"]}
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if not modes:
        return None
    known = {_MODE + name: own for own, names in _NAMES.items() for name in names}
    if len(modes) == 1 and (found := known.get(*modes)) is not None:
        return found
    raise ConfigError(
        "this model's embeddings are pooled in a way that is not trained here",
        where="model.name",
        found=f"{', '.join(sorted(modes))} in {file}",
        allowed=", ".join(sorted(known)),
        hint="task.pooling=mean",
    )


def ending_texts(tokenizer: PreTrainedTokenizerBase, texts: TextsConfig) -> PreTrainedTokenizerBase:
    """Give a tokenizer that puts the end token after each text by itself, and cuts texts as in training.

    Args:
        tokenizer: stays as it is.
        texts: how texts become tokens.

    Raises:
        ConfigError: it cannot be told to, or its class forgets it when it is read again.
    """
    wanted = Encoder(tokenizer).encode([_SAMPLE])[0].tolist()
    for change in (_leave, _set_flag, _add_to_template):
        ending = copy.deepcopy(tokenizer)
        change(ending)
        with tempfile.TemporaryDirectory() as folder:
            ending.save_pretrained(folder)
            if AutoTokenizer.from_pretrained(folder)(_SAMPLE)["input_ids"] != wanted:
                continue
        if ending.pad_token is None:
            ending.pad_token = ending.eos_token
        if texts.max_tokens is not None:
            ending.model_max_length = texts.max_tokens
        return ending
    what = "the tokenizer cannot be told to end each text with its end token, as it is trained"
    raise ConfigError(what, where="model.tokenizer.name", found=type(tokenizer).__name__, hint="a fast tokenizer")


def _leave(tokenizer: PreTrainedTokenizerBase) -> None:
    """It may do so already."""


def _set_flag(tokenizer: PreTrainedTokenizerBase) -> None:
    if hasattr(tokenizer, "add_eos_token"):
        tokenizer.add_eos_token = True


def _add_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Classes without the flag, or that lose a beginning by it, keep what `tokenizers` does after a text."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    end, number, before = str(tokenizer.eos_token), tokenizer.eos_token_id, backend.post_processor
    told = json.loads(backend.to_str())
    found = told["post_processor"] or {"type": "none"}
    steps = found["processors"] if found["type"] == "Sequence" else [found]
    if templates := [step for step in steps if step["type"] == "TemplateProcessing"]:
        # A second one would take what the first has put in front for a text of its own.
        templates[-1]["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
        templates[-1]["special_tokens"][end] = {"id": end, "ids": [number], "tokens": [end]}
        backend.post_processor = type(backend).from_str(json.dumps(told)).post_processor
        return
    template = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, number)])
    backend.post_processor = template if before is None else processors.Sequence([before, template])


def write_embedding_files(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, width: int, task: TaskConfig, texts: TextsConfig
) -> None:
    """Write them into the folder of a model.

    Args:
        folder: has the model's files.
        tokenizer: from `ending_texts`.
        width: of an embedding.
        task: how states become embeddings.
        texts: their prompts.
    """
    tokenizer.save_pretrained(folder)
    modules = ["Transformer", "Pooling", *(["Normalize"] if task.normalize else [])]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(modules[1:], 1))]
    _write(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}{name}"}
            for number, (name, path) in enumerate(zip(modules, paths, strict=True))
        ],
    )
    pooling = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": task.pooling is Pooling.cls,
        "pooling_mode_mean_tokens": task.pooling is Pooling.mean,
        "pooling_mode_lasttoken": task.pooling is Pooling.last,
        "include_prompt": True,
    }
    _write(folder / _POOLING, pooling)
    if task.normalize:
        _write(folder / paths[-1] / "config.json", {})
    about = {
        "prompts": {"query": texts.query_prompt, "document": texts.document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine" if task.normalize else "dot",
    }
    _write(folder / "config_sentence_transformers.json", about)


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
