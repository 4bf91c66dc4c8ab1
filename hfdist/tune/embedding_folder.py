"""The files beside an embedding model with which sentence-transformers opens its folder, written and read.

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
"""Text on which a tokenizer is tried."""
_POOLING = "1_Pooling/config.json"
_MOST_BYTES = 1 << 16
"""The most bytes of a pooling file that is read; a real one has some hundreds."""
_MODE = "pooling_mode_"
_POOLINGS = {
    f"{_MODE}lasttoken": Pooling.last,
    f"{_MODE}mean_tokens": Pooling.mean,
    f"{_MODE}mean": Pooling.mean,
    f"{_MODE}cls_token": Pooling.cls,
    f"{_MODE}cls": Pooling.cls,
}
"""Poolings by the names that sentence-transformers gives them: a field that is true, or `pooling_mode_` + a value."""
_TYPES = "sentence_transformers.models."
"""Package of the modules that all versions of sentence-transformers can import."""


def read_pooling(folder: Path) -> Pooling | None:
    """Give the pooling that a folder of sentence-transformers names; None: it names none.

    Raises:
        ConfigError: the model pools in a way that is not trained here.
    """
    file = folder / _POOLING
    modes = _read_modes(file)
    if not modes:
        return None
    if len(modes) == 1:
        [mode] = modes
        if mode in _POOLINGS:
            return _POOLINGS[mode]
    raise ConfigError(
        "this model's embeddings are pooled in a way that is not trained here",
        where="model.name",
        found=f"{', '.join(sorted(modes))} in {file}",
        allowed=", ".join(sorted(_POOLINGS)),
        hint="task.pooling=mean",
    )


def _read_modes(file: Path) -> set[str]:
    """Give the pooling modes of a file; empty: it is missing, names none, or is no file of sentence-transformers."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return set()
        values = json.loads(file.read_bytes())
        # Later versions write one value, earlier ones a flag for each mode.
        if isinstance(values.get("pooling_mode"), str):
            return {_MODE + values["pooling_mode"]}
        return {name for name, value in values.items() if name.startswith(_MODE) and value is True}
    except (OSError, ValueError, AttributeError, RecursionError):
        # The file is somebody else's: it may hold anything, such as a list, or lists of great depth.
        return set()


def ending_texts(tokenizer: PreTrainedTokenizerBase, texts: TextsConfig) -> PreTrainedTokenizerBase:
    """Make a tokenizer that puts the end token after each text by itself, and cuts texts as in training.

    Args:
        tokenizer: tokenizer of the training; it stays as it is.
        texts: how texts become tokens.

    Raises:
        ConfigError: no change makes the tokenizer do so, or its class forgets the change when it is read again.
    """
    wanted = Encoder(tokenizer).encode([_SAMPLE])[0].tolist()
    # From the least change to the largest; the first one counts that outlives being saved and read.
    for change in (_leave, _set_flag, _add_to_template):
        ending = copy.deepcopy(tokenizer)
        change(ending)
        if _read_again(ending)(_SAMPLE)["input_ids"] != wanted:
            continue
        if ending.pad_token is None:
            ending.pad_token = ending.eos_token
        if texts.max_tokens is not None:
            ending.model_max_length = texts.max_tokens
        return ending
    what = "the tokenizer cannot be told to end each text with its end token, as it is trained"
    raise ConfigError(what, where="model.tokenizer.name", found=type(tokenizer).__name__, hint="a fast tokenizer")


def _read_again(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give the tokenizer that others read from its saved folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return read


def _leave(tokenizer: PreTrainedTokenizerBase) -> None:
    """Change nothing: some tokenizers end each text already."""


def _set_flag(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the flag by which some classes of transformers end each text."""
    if hasattr(tokenizer, "add_eos_token"):
        tokenizer.add_eos_token = True


def _add_to_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the end token to what `tokenizers` does after a text.

    It helps classes that have no flag, or that lose the token at the beginning of a text by it.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    end, end_id = str(tokenizer.eos_token), tokenizer.eos_token_id
    described = json.loads(backend.to_str())
    processor = described["post_processor"] or {"type": "none"}
    steps = processor["processors"] if processor["type"] == "Sequence" else [processor]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if templates:
        # The last template is changed: a second one would take what the first has put in front for a text of its own.
        templates[-1]["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
        templates[-1]["special_tokens"][end] = {"id": end, "ids": [end_id], "tokens": [end]}
        backend.post_processor = type(backend).from_str(json.dumps(described)).post_processor
        return
    template = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, end_id)])
    before = backend.post_processor
    backend.post_processor = template if before is None else processors.Sequence([before, template])


def write_embedding_files(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, width: int, task: TaskConfig, texts: TextsConfig
) -> None:
    """Write the files of sentence-transformers into the folder of a model.

    Args:
        folder: folder that has the model's files.
        tokenizer: a tokenizer from `ending_texts`.
        width: numbers of an embedding.
        task: `task.*` of the run: how hidden states become embeddings.
        texts: prompts of queries and documents.
    """
    tokenizer.save_pretrained(folder)
    names = ["Transformer", "Pooling"]
    if task.normalize:
        names.append("Normalize")
    # The first module is the model, in the folder itself; the others have folders such as 1_Pooling.
    paths = [f"{number}_{name}" if number else "" for number, name in enumerate(names)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_TYPES}{name}"}
        for number, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    _write(folder / "modules.json", modules)
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
