"""The command line of `hfdist check`, and its answers as a table or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, TextIO

from hfdist.config.checks.offline import go_offline
from hfdist.config.cli.arguments import FLAG, as_command, read_arguments, read_flag
from hfdist.config.override_text import COMMAND_LINE
from hfdist.errors import ConfigError, printable
from hfdist.garbage_collector import quick_imports
from hfdist.topology import read_launcher

if TYPE_CHECKING:
    from hfdist.verify.check.answers import Answer

_HELP = """\
Say what a model takes: which tasks, layouts, adapters, attention and packing. No weights are read.

hfdist check tiny                     a preset of `model`
hfdist check Qwen/Qwen3-4B            a model of the Hub
hfdist check ./my_model               a folder, or a .gguf file

Each line is `yes`; `no`, with the reason; or `untried`. The reasons are those of a run. A `yes` of a layout says
besides that a small model of the class has trained two steps in it, on the CPU of this machine, with the losses and the
norms of gradients of one process. `untried`: no check refuses it, but no small model of the class can be trained here.

model=MODEL         the model; MODEL alone means the same
json=true, --json   for tools: one object, with all answers
--offline           ask nothing of the Hub

Exit codes: 0 there is an answer, 2 a wrong argument, or a model that no task takes, 7 the Hub does not answer.
"""
_KEYS = {"model": "PRESET|FOLDER|HUB_ID|FILE.gguf", "json": FLAG, "offline": FLAG}
_LONGEST = 400
"""Characters of a reason in the table."""


def _check(arguments: list[str]) -> None:
    values = read_arguments(arguments, _KEYS, first="model")
    if "model" not in values:
        what, hint = "which model?", "hfdist check tiny, or another preset, a folder or a Hub id"
        raise ConfigError(what, where=COMMAND_LINE, allowed=f"model={_KEYS['model']}", hint=hint)
    if (launched := read_launcher().world_size) > 1:
        what, hint = "this takes one process, which starts its own", f"hfdist check {values['model']}"
        raise ConfigError(what, where="the launcher", found=f"{launched} processes", hint=hint)
    if read_flag(values, "offline"):
        go_offline()
    # All is tried on the CPU: forks cannot use a GPU of their parent.
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    stdout = sys.stdout
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        # Libraries warn their developers here, not the users of hfdist.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        with quick_imports():
            import deepspeed  # noqa: F401  # forks have it then, and do not import it each for itself
            import torch

            from hfdist.verify.check.answers import Checker
        torch.set_num_threads(1)
        answers = Checker(values["model"]).answers()
        if read_flag(values, "json"):
            content = {"model": values["model"], "answers": [_as_values(answer) for answer in answers]}
            stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            _write_table(answers, stdout)


def _as_values(answer: Answer) -> dict[str, str | None]:
    question, reason = answer.question, answer.reason
    texts = dict.fromkeys(("what", "where", "found", "allowed", "hint")) if reason is None else reason.texts()
    command = " ".join(["hfdist", question.command, *question.overrides])
    asked = {"about": question.about, "choice": question.choice, "command": command}
    return asked | {"answer": answer.verdict.value, "remark": answer.remark} | texts


def _write_table(answers: Iterable[Answer], out: TextIO) -> None:
    """Write each line as soon as it is known."""
    about = None
    for answer in answers:
        if answer.question.about != about:
            about = answer.question.about
            out.write(f"{about}\n")
        out.write(f"  {answer.question.choice:<18} {answer.verdict.value}{_why(answer)}\n")
        out.flush()


def _why(answer: Answer) -> str:
    """Give the end of a line: the reason or the remark, if there is one."""
    if answer.reason is not None:
        found = "" if answer.reason.found is None else f": {answer.reason.found}"
        return f", because {printable(f'{answer.reason.what}{found}', _LONGEST)}"
    return "" if answer.remark is None else f", but {printable(answer.remark, _LONGEST)}"


main = as_command(_HELP, _check)
