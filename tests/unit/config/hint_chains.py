"""Follows each proposal of each hint of a command line with a mistake, to the end of its chain. Starts no process."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hfdist.config.cli import audit
from hfdist.config.cli.command import check_request
from hfdist.config.cli.flags import parse_flags
from hfdist.config.cli.recipe_names import NAMES, with_task
from hfdist.config.composition import compose
from hfdist.errors import HfdistError
from hfdist.models.architecture import check_fields
from hfdist.planning.command import parse_request as parse_plan
from hfdist.tools.jobs.command import parse_job
from hfdist.tools.sweep.command import parse_sweep

MOST_STEPS = 4
UNSET = "unset"
"""Stands for a word that takes a variable out of the environment, or all of a launcher's."""
OPENS_DATA = "data.cache_dir="
PLACEHOLDERS = {
    "OWNER/NAME": "owner/model", "FOLDER": "folder", "HOST": "localhost", "FILE": "texts.jsonl", "NAME": "first",
    "N": "1", "DIR": "folder", "RUN": "folder", "ID": "owner/model",
}  # fmt: skip
"""What a reader writes for a word in capitals."""
VALUES = {
    "data.sources.files.path": "texts.jsonl", "data.sources.stdlib.path": "folder", "optimizer.lr": "1e-3",
    "train.max_steps": "20", "task": "dpo", "run.name": "mine", "run.dir": "mine", "train.global_batch_size": "64",
    "run": "runs/first", "optimizer.name": "adamw", "to": "slurm", "data.sources.hub.path": "owner/rows",
}  # fmt: skip
"""What a reader writes for "..." after a key."""
_VALUE = r"""\{[^}]*\}|\[[^\]]*\]|"[^"]*"|[^\s,;()'"]+(?:,[^\s,;()'"]+)*"""
_WORD = rf"'[+~\w][\w./@~]*=[^']*'|[+~]{{0,2}}[a-z_][\w./@]*=(?:{_VALUE})"


def proposals(hint: str) -> Iterator[tuple[str | None, list[str]]]:
    """Give each command that a hint proposes, and its overrides; a command of None is that of before."""
    # What one has to do together stands together.
    text = re.sub(r",? and (give )?(?=[a-z'])", " ", hint)
    text = re.sub(r"\bunset ([A-Z_]+)", rf"{UNSET}=\1", re.sub(r",? (without a|no) launcher", f" {UNSET}=ALL", text))
    for found in _PROPOSAL.finditer(text):
        words = shlex.split(found["words"])
        if words or found["command"]:
            yield found["command"], [_filled(word if word.endswith("...") else word.rstrip(".:")) for word in words]


def _filled(word: str) -> str:
    key, _, value = word.partition("=")
    for name, text in PLACEHOLDERS.items():
        value = re.sub(rf"\b{name}\b", text, value)
    return f"{key}={VALUES.get(key.lstrip('+'), value) if value == '...' else value}"


def follow(line: str, error: HfdistError, command: str | None, words: list[str]) -> str:
    """Put words into a line: in place of those of the same keys, and of what the message says is not there."""
    given = shlex.split(line)
    start = next(index for index, word in enumerate(given) if not re.match(r"[A-Z_]+=", word))
    environment, name, rest = given[:start], given[start], given[start + 1 :]
    for unset in [word.partition("=")[2] for word in words if _key(word) == UNSET]:
        environment = [word for word in environment if unset != "ALL" and _key(word) != unset]
    words = [word for word in words if _key(word) != UNSET]
    keys = {_key(word) for word in words} | {_key(str(error.found))}
    if re.search(_REPLACED, error.what):
        keys.add(_key((error.where or "").partition(" (")[0]))
    gone = str(error.found).split() if "not an override" in error.what else [error.found]
    kept: list[str] = []
    skips = False
    for word in rest:
        was_skipped, skips = skips, word.startswith("--") and "=" not in word and word not in ("--offline",)
        if skips or (was_skipped and "=" not in word) or (word.startswith("--") and "=" in word):
            continue
        if _key(word) not in keys and word not in gone:
            kept.append(word)
    if "data.sources.files.path" in keys and "data.sources.files.path" not in map(_key, rest) and _path_of_data(rest):
        # As it was said in one word.
        kept = ["data=files", *(word for word in kept if _key(word) != "data")]
    return shlex.join([*environment, command or name, *kept, *words])


_REPLACED = (
    "there is no|has no option|lists no group|twice|cannot be deleted|not an override"
    r"|has this column|no such field|of its own|no dataset of the Hub|folder of a run, and|folder of token files"
)
"""Of what these messages are about, nothing stays."""


def _is_elsewhere(error: HfdistError) -> bool:
    """Whether it is the machine that lacks something."""
    return re.search("not installed|not on this machine", error.what) is not None


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _path_of_data(words: list[str]) -> bool:
    return any(word.startswith("data=") and re.search(r"[/*.]", word) for word in words)


def check(line: str) -> HfdistError | None:
    """Do all that a command does before it starts a process; the error that ends it."""
    given = shlex.split(line)
    start = next(index for index, word in enumerate(given) if not re.match(r"[A-Z_]+=", word))
    name, arguments = given[start], given[start + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        for word in given[:start]:
            patch.setenv(*word.split("=", 1))
        patch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))
        try:
            _COMMANDS.get(name, functools.partial(_check_run, name))(arguments)
        except HfdistError as error:
            return error
    return None


def _check_run(name: str, arguments: list[str]) -> None:
    is_alone = name in ("pretokenize", "index")
    recipe = "pretrain" if is_alone else NAMES[name][0]
    flags = parse_flags(arguments if is_alone else with_task(name, arguments))
    request = compose.make_request(flags.config_name or recipe, flags.overrides, flags.config_dir)
    config, _ = check_request(request, flags, takes_ranks=not is_alone)
    check_fields(config.model, config.task.name.traits.head)
    if any(word.startswith(OPENS_DATA) for word in arguments):
        from hfdist.data import open_corpus

        open_corpus(config.data)


_COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "plan": parse_plan,
    "job": parse_job,
    "sweep": parse_sweep,
    "audit": audit.parse_request,
    "serve": lambda arguments: None,
}
_PROPOSAL = re.compile(rf"(?:\bhfdist (?P<command>{'|'.join([*_COMMANDS, *NAMES])})\b)?(?P<words>(?:\s*(?:{_WORD}))*)")


class Chains:
    """Follows lines, each once.

    Args:
        check: gives the error of a line.
    """

    def __init__(self, check: Callable[[str], HfdistError | None] = check) -> None:
        self.check = functools.cache(check)
        self._follow_once = functools.cache(self._follow)

    def failures(self, line: str) -> list[str]:
        """Say what is wrong with the hints of a line with a mistake."""
        error = self.check(line)
        if error is None:
            return [f"{line}: nothing is wrong with it"]
        return list(self._follow_once(line, MOST_STEPS, frozenset()))

    def _follow(self, line: str, steps: int, followed: frozenset[str]) -> tuple[str, ...]:
        """Args: followed: the keys of earlier proposals, which a reader does not take back."""
        error = self.check(line)
        if error is None or (followed and _is_elsewhere(error)):
            return ()
        found = [
            (command, words)
            for command, words in proposals(error.hint or "")
            if command or not {_key(word) for word in words} <= followed
        ]
        if not found:
            return (f"{line}: nothing to follow\n{error}",) if steps < MOST_STEPS else ()
        if not steps:
            return (f"{line}: no end\n{error}",)
        problems: list[str] = []
        for command, words in found:
            after, keys = follow(line, error, command, words), {_key(word) for word in words}
            following = self.check(after)
            if following is None:
                continue
            if (following.what, following.where) == (error.what, error.where):
                problems.append(f"{line}\n{error}\n-> {after}: the same again\n{following}")
            elif keys & set(re.split(r", | \(|\)", following.where or "")) and not _is_elsewhere(following):
                problems.append(f"{line}\n{error}\n-> {after}: refused\n{following}")
            else:
                problems.extend(
                    f"{line}\n-> {problem}" for problem in self._follow_once(after, steps - 1, followed | keys)
                )
        return tuple(problems)
