"""The environment `reasoning_gym`: rows of reasoning-gym, whose package scores the one turn of an episode.

A row has the question as its prompt, the answer as its completion, and the item's `metadata` as a column.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hfdist.environments.environment import Environment, Row, Step
from hfdist.errors import DataError

_WHERE = "environment reasoning_gym"
_EVALUATING = ("parse_expr", "sympify", "eval(", "exec(")
"""What a scorer must not call: it would run what the model has written, in this process."""


class ReasoningGym(Environment):
    """One question of a data set of reasoning-gym."""

    def reset(self, row: Row) -> None:
        """Take the item; DataError: the row is none of reasoning-gym, or its scorer evaluates texts as Python."""
        metadata = row.columns.get("metadata")
        name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str):
            what, allowed = "the row does not say of which data set it is", "a column `metadata` with `source_dataset`"
            raise DataError(what, where=_WHERE, found=f"{metadata!r:.80}", allowed=allowed)
        self._score = _scorer(name)
        self._item = {"question": row.prompt, "answer": row.reference, "metadata": metadata}

    def step(self, text: str) -> Step:
        """Score the answer; one that the scorer cannot read gets 0."""
        try:
            score = float(self._score(text.strip(), self._item))
        except Exception:  # some scorers raise on what is no answer of theirs
            score = 0.0
        return Step(None, score, done=True)


@cache
def _scorer(name: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym

    try:
        score: Callable[[str, Mapping[str, Any]], float] = reasoning_gym.get_score_answer_fn(name)
    except ValueError as error:
        raise DataError("reasoning-gym has no such data set", where=_WHERE, found=name) from error
    source = inspect.getsource(inspect.getmodule(score) or score)
    if found := [word for word in _EVALUATING if word in source]:
        what = f"the scorer of this data set evaluates texts as Python ({found[0].rstrip('(')})"
        raise DataError(what, where=_WHERE, found=name, hint="another data set, or a reward of your own")
    return score
