"""Formats of examples for fine-tuning: the columns of a row become one canonical form.

An example is text, too: JSON of its canonical form. So digests, the held-out split, order, ledger and caches treat it
as they treat a document. The canonical forms are

{"text": ...}                                          plain text: every token is a target
{"prompt": ..., "completion": ...}                     text: the completion's tokens are targets
{"messages": [...], "tools": [...], "learned_from": n} a conversation as OpenAI writes it; assistant messages before
                                                       number n are no targets
{"messages": [...], "images": [{"digest", "size"}]}    the same with images: `images.PLACE` stands in its contents
{"query": ..., "documents": [...]}                     texts: a query, and the one that belongs to it before those that
                                                       do not; "ranked" in place of "documents": read with the query
{"text_a": ..., "text_b": ..., "score": n}             texts: how alike two are
{"text": ..., "text_pair": ..., "label": ...}          a text, or a pair, and its label: a name, a number, or a list
{"tokens": [...], "tags": [...]}                       words, and the label of each, null where it has none
{"source": ..., "target": ...}                         texts: what an encoder reads, and what a decoder writes of it

A preference is such a form with "rejected": of a text, the rejected completion; of a conversation, the messages that
stand in the place of those from number n on; or true, where the row's only answer is the rejected one. A prompt
alone has an empty completion, or no message from number n on. With `data.keep_columns`, JSON of the columns that the
format does not read follows in a line of its own: `split_columns`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from hfdist.config.batch import IGNORED
from hfdist.config.data import NEGATIVES, RowFormat
from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text
from hfdist.data.sources.images import COLUMNS as IMAGE_COLUMNS
from hfdist.data.sources.images import ImageRules, WithImages, take_images
from hfdist.data.sources.messages import (
    as_messages,
    canonical_message,
    canonical_turn,
    chat_example,
    messages_of,
    with_system,
)
from hfdist.data.sources.values import list_of, refuse, text_of, written_text, written_texts

_LONGEST_LABEL = 1000
"""Characters of a label's name: all names are in memory, and in the model's config."""
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""Labels and scores are learned as float32: larger ones, which JSON may hold, would be infinite."""
_NO_TAG = (None, IGNORED)
"""Tags of words whose label is not learned; the number is that of transformers' token classification."""

Row = Mapping[str, object]
"""The columns that a row has, by name."""
Example = dict[str, object]
"""A canonical form."""


class RowColumns(NamedTuple):
    """A format: the columns that its rows have, and the function that makes the canonical form of them."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Row], Example]
    """Makes the canonical form of a row; ContentError, without its `where`: the values are of another form."""

    def fits(self, present: Collection[str]) -> bool:
        """Whether all columns that the format needs are there."""
        return all(name in present for name in self.needed)


def from_text(row: Row) -> Example:
    """Convert plain text."""
    return {"text": text_of(row["text"], "text")}


def _from_messages(row: Row) -> Example:
    """Convert OpenAI's `messages`, with or without `tools`."""
    messages = list_of(row["messages"], "messages")
    return chat_example([canonical_message(item, f"messages[{n}]") for n, item in enumerate(messages)], row)


def _from_sharegpt(row: Row) -> Example:
    """Convert ShareGPT's `conversations`, whose turns have `from` and `value`."""
    items = list_of(row["conversations"], "conversations")
    messages = [canonical_turn(item, f"conversations[{n}]") for n, item in enumerate(items)]
    return chat_example(with_system(messages, row), row)


def _from_alpaca(row: Row) -> Example:
    """Convert Alpaca's `instruction`, `input`, `output` and earlier turns in `history`; the last answer is learned."""
    messages: list[Example] = []
    for n, turn in enumerate(list_of(row.get("history") or [], "history")):
        if not isinstance(turn, list) or len(turn) != 2:
            refuse("an earlier turn is no pair", f"history[{n}]", turn, "[instruction, output]")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": text_of(text, f"history[{n}]")})
    asked = [text_of(row[name], name) for name in ("instruction", "input") if row.get(name)]
    messages.append({"role": "user", "content": "\n".join(asked)})
    messages.append({"role": "assistant", "content": text_of(row["output"], "output")})
    whole = with_system(messages, row)
    example = chat_example(whole, row)
    if row.get("history"):
        example["learned_from"] = len(whole) - 1
    return example


def _from_prompt(row: Row) -> Example:
    """Convert a prompt and its completion: both are texts, or either is messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    return _answered(prompt, completion, row)


def _answered(prompt: object, answer: object, row: Row) -> Example:
    """Make a conversation of a prompt and its answer; either may be a text."""
    asked = messages_of(prompt, "user", "prompt")
    answers = messages_of(answer, "assistant", "completion")
    return chat_example([*asked, *answers], row) | {"learned_from": len(asked)}


def _from_preference(row: Row) -> Example:
    """Convert a chosen and a rejected answer, with their prompt, or with what both begin with as the prompt."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    first = next(iter(chosen), None) if isinstance(chosen, list) else None
    if isinstance(prompt, str) and isinstance(first, dict) and first.get("role") in ("system", "user"):
        # Both answers are whole conversations, which begin with the prompt.
        prompt = None
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        if prompt is None:
            # The space belongs to the answers: tokenizers put it in front of a word.
            prompt = chosen[: _num_common(chosen, rejected)].rstrip(" ")
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return {"prompt": prompt, "completion": chosen, "rejected": rejected}
    if prompt is None:
        chosen, rejected = list_of(chosen, "chosen"), list_of(rejected, "rejected")
        num_common = _num_common(chosen, rejected)
        prompt, chosen, rejected = chosen[:num_common], chosen[num_common:], rejected[num_common:]
    example = _answered(prompt, chosen, row)
    others = messages_of(rejected, "assistant", "rejected")
    if not others and not example["learned_from"]:
        refuse("the conversation is empty", "rejected", None, "a message or more")
    return example | {"rejected": others}


def _num_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the letters, or the messages, with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _from_unpaired(row: Row) -> Example:
    """Convert a prompt and an answer that was liked, or was not."""
    if row["label"] not in (True, False):
        refuse(
            "this says neither that the answer was liked nor that it was not", "label", row["label"], "true or false"
        )
    example = _from_prompt(row)
    return example if row["label"] else example | {"rejected": True}


def _from_prompt_alone(row: Row) -> Example:
    """Convert a prompt alone: a text, or messages."""
    prompt = as_messages(row["prompt"])
    return _from_prompt({**row, "prompt": prompt, "completion": "" if isinstance(prompt, str) else []})


def _from_retrieval(row: Row) -> Example:
    """Convert a query, the text that belongs to it, and texts that do not."""
    query = "query" if "query" in row else "anchor"
    positive = "positive" if "positive" in row else "pos"
    positives = written_texts(row[positive], positive)
    if len(positives) != 1:
        refuse("a row has one text that belongs to its query", positive, positives, "one text; a row for each other")
    negatives = [text for name in NEGATIVES if name in row for text in written_texts(row[name], name)]
    return {"query": written_text(row[query], query), "documents": [*positives, *negatives]}


def _from_ranking(row: Row) -> Example:
    """Convert a query and texts, each of which the model reads together with the query."""
    example = _from_retrieval(row)
    return {"query": example["query"], "ranked": example["documents"]}


def _from_scored_pair(row: Row) -> Example:
    """Convert two texts, and a score of how alike they are."""
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not _is_in_range(score):
        refuse("this is no number", "score", score, "a number, such as 0.8")
    return {name: written_text(row[name], name) for name in ("text_a", "text_b")} | {"score": score}


def _from_labelled(row: Row) -> Example:
    """Convert a text, or a pair of texts, and its label."""
    texts = {name: written_text(row[name], name) for name in ("text", "text_pair") if row.get(name) is not None}
    label = row["label"]
    if isinstance(label, list):
        return {**texts, "label": [_label(item, f"label[{n}]") for n, item in enumerate(label)]}
    return {**texts, "label": _label(label, "label")}


def _label(value: object, part: str) -> str | int | float:
    """Give a label, which is a name or a number; `part` names its place in messages."""
    if isinstance(value, int | float) and _is_in_range(value):
        return int(value) if isinstance(value, bool) else value
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_LABEL:
        allowed = f"a name of at most {_LONGEST_LABEL:,} characters, a number, or a list of them"
        refuse("this is no label", part, value, allowed)
    return value


def _is_in_range(number: float) -> bool:
    return -_LARGEST_NUMBER <= number <= _LARGEST_NUMBER


def _from_tagged(row: Row) -> Example:
    """Convert words, each with its tag."""
    words = [text_of(word, f"tokens[{n}]") for n, word in enumerate(list_of(row["tokens"], "tokens"))]
    tags = list_of(row["tags"], "tags")
    if len(words) != len(tags):
        refuse("each word has one tag", "tags", f"{len(tags)}, of {len(words)} tokens", "as many as tokens")
    if not any(word.strip() for word in words):
        refuse("the text is empty", "tokens", words, "words")
    labels = [None if tag in _NO_TAG else _label(tag, f"tags[{n}]") for n, tag in enumerate(tags)]
    return {"tokens": words, "tags": labels}


def _from_source(row: Row) -> Example:
    """Convert a source and its target."""
    source, target = ("source", "target") if "source" in row else ("prompt", "completion")
    return {"source": written_text(row[source], source), "target": written_text(row[target], target)}


def split_columns(text: str) -> tuple[str, str]:
    """Split the text of a row into its example and JSON of its other columns, "" where they are not kept."""
    # JSON has no line ends of its own.
    example, _, columns = text.partition("\n")
    return example, columns


def texts_in(example: str) -> str:
    """Give all texts of an example, a line each: its fields, then the contents of its messages."""
    values = json.loads(split_columns(example)[0])
    texts = [value for value in values.values() if isinstance(value, str)]
    for name in ("documents", "ranked", "tokens"):
        texts += values.get(name, [])
    messages = list(values.get("messages", []))
    if isinstance(values.get("rejected"), list):
        messages += values["rejected"]
    return "\n".join([*texts, *(message["content"] for message in messages if "content" in message)])


FORMS: dict[RowFormat, RowColumns] = {
    RowFormat.messages: RowColumns(("messages",), ("tools", *IMAGE_COLUMNS), _from_messages),
    RowFormat.sharegpt: RowColumns(("conversations",), ("system", "tools", *IMAGE_COLUMNS), _from_sharegpt),
    RowFormat.alpaca: RowColumns(
        ("instruction", "output"), ("input", "system", "history", *IMAGE_COLUMNS), _from_alpaca
    ),
    RowFormat.prompt_completion: RowColumns(("prompt", "completion"), ("tools", *IMAGE_COLUMNS), _from_prompt),
}
"""Formats in the order in which `auto` tries them; plain text comes last."""
FORMS_BY_NAME = FORMS | {
    RowFormat.preference: RowColumns(("chosen", "rejected"), ("prompt", "tools", *IMAGE_COLUMNS), _from_preference),
    RowFormat.unpaired_preference: RowColumns(
        ("prompt", "completion", "label"), ("tools", *IMAGE_COLUMNS), _from_unpaired
    ),
    RowFormat.prompt: RowColumns(("prompt",), ("tools", *IMAGE_COLUMNS), _from_prompt_alone),
    RowFormat.retrieval: RowColumns(("query", "positive"), NEGATIVES, _from_retrieval),
    RowFormat.ranking: RowColumns(("query", "positive"), NEGATIVES, _from_ranking),
    RowFormat.scored_pair: RowColumns(("text_a", "text_b", "score"), (), _from_scored_pair),
    RowFormat.labelled: RowColumns(("text", "label"), ("text_pair",), _from_labelled),
    RowFormat.tagged: RowColumns(("tokens", "tags"), (), _from_tagged),
    RowFormat.source_target: RowColumns(("source", "target"), (), _from_source),
}
"""All formats that have columns of their own; `auto` tries those of `FORMS` alone."""
_QUERIES = (("anchor", "positive"), ("query", "pos"))
OTHER_NAMES = {
    RowFormat.retrieval: [RowColumns(needed, NEGATIVES, _from_retrieval) for needed in _QUERIES],
    RowFormat.ranking: [RowColumns(needed, NEGATIVES, _from_ranking) for needed in _QUERIES],
    RowFormat.source_target: [RowColumns(("prompt", "completion"), (), _from_source)],
}
"""Formats with the columns as sentence-transformers, FlagEmbedding and TRL name them."""


def write_example(form: RowColumns, row: Row, rules: ImageRules | None, where: str) -> str | BadRow:
    """Write a row that has the columns of a format as JSON of its canonical form; a row that has no form is bad.

    `rules` say what images of the source may be, and None leaves images out. `where` names the file and the row. The
    text of a row with images is a `WithImages`.
    """
    try:
        has_images = not set(IMAGE_COLUMNS).isdisjoint(form.optional)
        example, files = take_images(form.convert(row), row if has_images else {}, rules)
        # The order of keys stays: templates write tools as they find them.
        text = json.dumps(example, ensure_ascii=False)
    except ContentError as error:
        error.where = where
        return BadRow(error)
    # Values that JSON does not have, such as times; and too deep a nesting.
    except (TypeError, ValueError, RecursionError) as error:
        return BadRow(ContentError(f"the row cannot be read as an example: {error}", where=where))
    checked = check_size(len(text), where=where) or check_text(text, where=where)
    if not files or isinstance(checked, BadRow):
        return checked
    return WithImages.of(checked, files)
