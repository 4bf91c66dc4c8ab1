"""A few lines of Python that load the model of a run and use it for what it has learned."""

from __future__ import annotations

import json

from hfdist.config.data import ProblemType
from hfdist.config.task import Head, TaskName
from hfdist.models.heads import HEADS, IMAGE_TEXT, is_type
from hfdist.run.ending import Ending

_PROMPT = "Once upon a time"
_LONGEST_PROMPT = 120


def describe_use(end: Ending) -> list[str]:
    """Give lines of Python to copy, at the margin so that a prompt takes them."""
    folder, head = json.dumps(str(end.folder), ensure_ascii=False), end.config.task.name.traits.head
    if head is Head.none:
        return _embed(folder)
    if head is Head.masked:
        return _fill(folder)
    if end.config.task.name is TaskName.rerank and not end.config.adapter.is_used:
        return _rank(folder)
    if end.config.data.images.used:
        return _ask_about_image(folder)
    reads_images = end.model_type not in HEADS[head].by_type and is_type(head, end.model_type)
    name = (IMAGE_TEXT if reads_images else HEADS[head]).auto.__name__
    is_whole = not end.config.adapter.is_used or (end.folder / "config.json").is_file()
    opens = _open_model(name, folder) if is_whole else _open_adapter(name, folder, end)
    return [*opens, *(_generate(end) if head in (Head.tokens, Head.targets) else _score())]


def _open_model(name: str, folder: str) -> list[str]:
    return [
        f"from transformers import {name}, AutoTokenizer",
        f"model, tokenizer = (auto.from_pretrained({folder}) for auto in ({name}, AutoTokenizer))",
    ]


def _open_adapter(name: str, folder: str, end: Ending) -> list[str]:
    """Open the base, whose config may say another number of labels, with the adapter."""
    head, labels = end.config.task.name.traits.head, end.config.data.labels
    number = 1 if labels.problem_type is ProblemType.regression else max(len(labels.names), 1)
    given = f"{folder}, num_labels={number}" if head is Head.score or head.gives_labels else folder
    imports = ["from transformers import AutoTokenizer"]
    if name == IMAGE_TEXT.auto.__name__:
        # PEFT has no class for these, and that of transformers opens adapters, too.
        imports = [f"from transformers import {name}, AutoTokenizer"]
    else:
        name = name.replace("AutoModel", "AutoPeftModel")
        imports.append(f"from peft import {name}")
    return [*imports, f"model, tokenizer = {name}.from_pretrained({given}), AutoTokenizer.from_pretrained({folder})"]


def _embed(folder: str) -> list[str]:
    query, texts = 'model.encode_query(["A query."])', 'model.encode_document(["A text.", "Another one."])'
    return [
        "from sentence_transformers import SentenceTransformer",
        f"model = SentenceTransformer({folder})",
        f"print(model.similarity({query}, {texts}))",
    ]


def _rank(folder: str) -> list[str]:
    return [
        "from sentence_transformers import CrossEncoder",
        f"model = CrossEncoder({folder})",
        'print(model.rank("A query.", ["A text.", "Another one."]))',
    ]


def _fill(folder: str) -> list[str]:
    return [
        "from transformers import pipeline",
        f'fill = pipeline("fill-mask", model={folder})',
        'print(fill(f"The capital of France is {fill.tokenizer.mask_token}."))',
    ]


def _ask_about_image(folder: str) -> list[str]:
    chat = (
        '[{"role": "user", "content": [{"type": "image", "path": "IMAGE"}, {"type": "text", "text": "What is it?"}]}]'
    )
    how = 'add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"'
    classes = "AutoModelForImageTextToText, AutoProcessor"
    return [
        f"from transformers import {classes}",
        f"model, processor = (auto.from_pretrained({folder}) for auto in ({classes}))",
        f"inputs = processor.apply_chat_template({chat}, {how})",
        "print(processor.decode(model.generate(**inputs, max_new_tokens=50, do_sample=False)[0]))",
    ]


def _score() -> list[str]:
    return ['print(model(**tokenizer("A good answer.", return_tensors="pt")).logits)']


def _generate(end: Ending) -> list[str]:
    own, of_data = end.config.report.sample_prompt, end.sample_prompt
    if len(of_data or "") > _LONGEST_PROMPT:
        of_data = None
    # The run's own sample is made so, too: an answer is greedy; a text that goes on freely would repeat itself.
    choice = "do_sample=False" if of_data and not own else "do_sample=True, top_k=40"
    lines, inputs = [], f'tokenizer({json.dumps(own or of_data or _PROMPT, ensure_ascii=False)}, return_tensors="pt")'
    if end.is_chat:
        lines = ['chat = [{"role": "user", "content": "Who are you?"}]']
        inputs = 'tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")'
    return [*lines, f"print(tokenizer.decode(model.generate(**{inputs}, max_new_tokens=50, {choice})[0]))"]
