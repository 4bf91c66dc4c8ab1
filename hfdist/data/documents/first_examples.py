"""What the first examples of a corpus are: whether they are turns of a chat, and why none has a target."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hfdist.config.data import DataConfig, TooLong
from hfdist.data.documents.corpus import Corpus
from hfdist.errors import DataError

_MOST_LOOKED_AT = 200
"""Examples whose roles are counted."""
_MOST_SEARCHED = 64
"""Rows of a source among which one with an image is looked for."""
_MOST_TRIED = 16
"""Examples until one can be read."""
_ANSWERS = "assistant"
_ASKING = {"user", "system", "developer", "tool"}


def explain_no_targets(corpus: Corpus, config: DataConfig) -> tuple[str, str]:
    """Look at the first examples: give the roles that were found in them ("": no conversations), and a hint."""
    turns = _first_turns(corpus, _MOST_LOOKED_AT)
    roles = Counter(str(turn.get("role")) for turn in turns)
    answers = [turn for turn in turns if turn.get("role") == _ANSWERS]
    found = f"turns of the roles {', '.join(f'{role} ({count:,})' for role, count in roles.most_common(5))}"
    if roles and not roles.keys() - _ASKING:
        return found, f"turns of the role `{_ANSWERS}` in the rows: they are what is learned"
    if roles and not answers:
        return found, f"a turn of the role `{_ANSWERS}` is what is learned: rename the role of the answers in the rows"
    if roles and not any(turn.get("content") or turn.get("tool_calls") for turn in answers):
        return f"{found}; no answer has a text", "the answers in the rows, which are learned"
    cut = "data.too_long=truncate_start" if config.too_long is TooLong.truncate_end else "a larger data.sequence_length"
    return found if roles else "", f"{cut} where answers were cut off; report.preview=2 shows what is learned"


def are_chats(corpus: Corpus) -> bool | None:
    """Whether examples are turns of a chat, by the first one that can be read; None: plain text, or tokens."""
    examples = _first_examples(corpus, _MOST_TRIED)
    return next(("messages" in example for example in examples if {"messages", "prompt"} & example.keys()), None)


def have_images(corpus: Corpus) -> bool:
    """Whether one of the first rows of a source has an image; those that cannot be read do not count."""
    by_source = _first_examples_by_source(corpus, _MOST_SEARCHED)
    return any("images" in example for _, examples in by_source for example in examples)


def find_source_without_prompts(corpus: Corpus) -> str | None:
    """Give the name of a source whose first rows have no prompt, as plain text and tokens; None: there is none."""
    for name, examples in _first_examples_by_source(corpus, _MOST_TRIED):
        if not any({"messages", "prompt"} & example.keys() for example in examples):
            return name
    return None


def are_alike(corpus: Corpus) -> bool:
    """Whether the two answers of each of the first pairs are the same, so that nothing tells them apart."""
    examples = _first_examples(corpus, _MOST_TRIED)
    pairs = [example for example in examples if isinstance(example.get("rejected"), str | list)]
    return bool(pairs) and all(_chosen(example) == example["rejected"] for example in pairs)


def are_silent(corpus: Corpus) -> bool:
    """Whether the answers of each of the first chats are empty, so that only their end is learned."""
    answers = [turn for turn in _first_turns(corpus, _MOST_TRIED) if turn.get("role") == _ANSWERS]
    return bool(answers) and not any(value for turn in answers for name, value in turn.items() if name != "role")


def are_judged_alike(corpus: Corpus) -> bool:
    """Whether the answers of the first rows are all liked, or all not; of answers with a label."""
    examples = [example for example in _first_examples(corpus, _MOST_LOOKED_AT) if example]
    return len({example.get("rejected") is True for example in examples}) == 1


def _chosen(example: dict[str, Any]) -> object:
    return example["messages"][example["learned_from"] :] if "messages" in example else example["completion"]


def _first_turns(corpus: Corpus, most: int) -> list[dict[str, object]]:
    found = (example.get("messages") for example in _first_examples(corpus, most))
    return [turn for turns in found if isinstance(turns, list) for turn in turns if isinstance(turn, dict)]


def _first_examples(corpus: Corpus, most: int) -> Iterator[dict[str, object]]:
    """Read the first examples, one when it is asked for; {}: it cannot be read, or a text that is no example."""
    for number in range(min(corpus.num_documents, most) if corpus.has_examples else 0):
        yield _example(corpus, number)


def _first_examples_by_source(corpus: Corpus, most: int) -> Iterator[tuple[str, Iterator[dict[str, object]]]]:
    """Give the name of each source, and its first examples: see `_first_examples`."""
    first = 0
    for name, source in corpus.sources.items():
        num_documents = int(source.runs.rows.sum())
        numbers = range(first, first + min(num_documents, most))
        yield name, (_example(corpus, number) for number in numbers)
        first += num_documents


def _example(corpus: Corpus, document: int) -> dict[str, object]:
    example: object = None
    # A text may be any JSON, or none.
    with suppress(DataError, ValueError, RecursionError):
        if corpus.shard_of(document)[0].gives_examples:
            example = json.loads(corpus.text(document))
    return example if isinstance(example, dict) else {}
