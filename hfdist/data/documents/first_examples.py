"""Properties of a corpus that its first examples show: whether they are chats, and why none of them has a target."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hfdist.config.data import DataConfig, TooLong
from hfdist.data.documents.corpus import Corpus
from hfdist.errors import DataError

_MOST_LOOKED_AT = 200
"""Examples whose roles and labels are counted."""
_MOST_SEARCHED = 64
"""Rows of each source among which one with an image is looked for."""
_MOST_TRIED = 16
"""Examples that are read for any other question."""
_ANSWERING_ROLE = "assistant"
_ASKING_ROLES = {"user", "system", "developer", "tool"}


def explain_no_targets(corpus: Corpus, config: DataConfig) -> tuple[str, str]:
    """Say why the first examples have no targets: give the roles of their turns ("": they are no chats), and a hint."""
    turns = _first_turns(corpus, _MOST_LOOKED_AT)
    roles = Counter(str(turn.get("role")) for turn in turns)
    answers = [turn for turn in turns if turn.get("role") == _ANSWERING_ROLE]
    found = f"turns of the roles {', '.join(f'{role} ({count:,})' for role, count in roles.most_common(5))}"
    if roles and not roles.keys() - _ASKING_ROLES:
        return found, f"turns of the role `{_ANSWERING_ROLE}` in the rows: they are what is learned"
    if roles and not answers:
        return (
            found,
            f"a turn of the role `{_ANSWERING_ROLE}` is what is learned: rename the role of the answers in the rows",
        )
    if roles and not any(turn.get("content") or turn.get("tool_calls") for turn in answers):
        return f"{found}; no answer has a text", "the answers in the rows, which are learned"
    remedy = "a larger data.sequence_length"
    if config.too_long is TooLong.truncate_end:
        remedy = "data.too_long=truncate_start"
    hint = f"{remedy} where answers were cut off; report.preview=2 shows what is learned"
    return found if roles else "", hint


def are_chats(corpus: Corpus) -> bool | None:
    """Whether the first example that can be read is a chat; None: there is none, as of plain text and token files."""
    for example in _first_examples(corpus, _MOST_TRIED):
        if "messages" in example or "prompt" in example:
            return "messages" in example
    return None


def have_images(corpus: Corpus) -> bool:
    """Whether one of the first rows of some source has an image; rows that cannot be read have none."""
    by_source = _first_examples_by_source(corpus, _MOST_SEARCHED)
    return any("images" in example for _, examples in by_source for example in examples)


def find_source_without_prompts(corpus: Corpus) -> str | None:
    """Give the name of a source whose first rows have no prompt, as plain text has none; None: there is no such one."""
    for name, examples in _first_examples_by_source(corpus, _MOST_TRIED):
        if not any({"messages", "prompt"} & example.keys() for example in examples):
            return name
    return None


def are_alike(corpus: Corpus) -> bool:
    """Whether both answers of each of the first pairs are the same, so that nothing tells them apart."""
    examples = _first_examples(corpus, _MOST_TRIED)
    pairs = [example for example in examples if isinstance(example.get("rejected"), str | list)]
    return bool(pairs) and all(_chosen(example) == example["rejected"] for example in pairs)


def are_silent(corpus: Corpus) -> bool:
    """Whether all answers of the first chats are empty, so that only the end of a turn is learned."""
    answers = [turn for turn in _first_turns(corpus, _MOST_TRIED) if turn.get("role") == _ANSWERING_ROLE]
    return bool(answers) and not any(value for turn in answers for name, value in turn.items() if name != "role")


def are_judged_alike(corpus: Corpus) -> bool:
    """Whether the answers of the first rows, each with a label, are all liked or all disliked."""
    examples = [example for example in _first_examples(corpus, _MOST_LOOKED_AT) if example]
    return len({example.get("rejected") is True for example in examples}) == 1


def _chosen(example: dict[str, Any]) -> object:
    """Give the chosen answer of a pair: a text, or the messages after the prompt."""
    if "messages" in example:
        return example["messages"][example["learned_from"] :]
    return example["completion"]


def _first_turns(corpus: Corpus, most: int) -> list[dict[str, object]]:
    """Give all turns of the chats among the first examples."""
    found: list[dict[str, object]] = []
    for example in _first_examples(corpus, most):
        turns = example.get("messages")
        if isinstance(turns, list):
            found += [turn for turn in turns if isinstance(turn, dict)]
    return found


def _first_examples(corpus: Corpus, most: int) -> Iterator[dict[str, object]]:
    """Give the first examples, each read when it is asked for; {} stands for one that cannot be read, or plain text."""
    if corpus.has_examples:
        for number in range(min(corpus.num_documents, most)):
            yield _example(corpus, number)


def _first_examples_by_source(corpus: Corpus, most: int) -> Iterator[tuple[str, Iterator[dict[str, object]]]]:
    """Give the name of each source with its first examples, each read when it is asked for."""
    first = 0
    for name, source in corpus.sources.items():
        num_documents = int(source.runs.rows.sum())
        numbers = range(first, first + min(num_documents, most))
        yield name, (_example(corpus, number) for number in numbers)
        first += num_documents


def _example(corpus: Corpus, document: int) -> dict[str, object]:
    """Read the example of a document; {}: it cannot be read, or is plain text."""
    shard, _ = corpus.shard_of(document)
    if not shard.gives_examples:
        return {}
    # A token file gives texts, which may be any JSON or none.
    try:
        example = json.loads(corpus.text(document))
    except (DataError, ValueError, RecursionError):
        return {}
    return example if isinstance(example, dict) else {}
