"""Signs in the first rows that a user has not meant what the config says of the data."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hfdist.config.data import RowFormat
from hfdist.config.model import Init
from hfdist.config.override_text import in_shell
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName
from hfdist.data import Corpus, are_alike, are_chats, are_judged_alike, are_silent

_TURNS = {"instruction": "prompt", "output": "completion"}
"""Columns that become turns, in place of those that become plain text."""


def advise(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> str | None:
    """Say what a user may not have meant: equal pairs, empty answers, chats as plain text; None: nothing."""
    if are_alike(corpus):
        return "chosen and rejected are the same in each of the first pairs: they tell nothing apart"
    if config.task.name is TaskName.kto and are_judged_alike(corpus):
        return "the label is the same in each of the first rows: kto learns from answers that were liked and others"
    if are_silent(corpus):
        return "the answers in each of the first chats are empty: only their end is learned"
    if config.model.init is not Init.pretrained or tokenizer.chat_template is None or are_chats(corpus) is not False:
        return None
    hint = _columns_of_turns(config) or "rows whose prompt and answers are lists of messages"
    return f"prompts and answers are learned as plain text, without the model's chat template; turns of a chat: {hint}"


def _columns_of_turns(config: RunConfig) -> str | None:
    """Give the override that makes turns of the columns that were found; None: the config names its columns itself."""
    data = config.data
    is_found = data.format is RowFormat.auto and not any(one.columns or one.format for one in data.sources.values())
    if config.task.name is not TaskName.causal_lm or not is_found:
        return None
    return in_shell("data.columns", {ours: data.columns.get(theirs, theirs) for ours, theirs in _TURNS.items()})
