"""The command `hfdist`: `hfdist pretrain ...` is the recipe of that name, with the same flags and overrides."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import sys
from pathlib import Path

from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message
from hfdist.config.cli.recipe_names import HINTS, NAMES, RECIPES, RUN, names_config, with_task
from hfdist.errors import ConfigError, nearest
from hfdist.version import __version__

_COMPLETION = """\
_hfdist() {
    local choices
    choices=$(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" "${COMP_WORDS[0]}" completion query 2>/dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _hfdist hfdist
"""
_WORDS = {
    "audit": "run= step= text=short text=full processes= --offline",
    "bandwidth": "processes= largest= out= hardware= call_seconds= --json",
    "check": "model= --json --offline",
    "doctor": "processes= run.dir= pair_seconds= --offline --json",
    "explain-hang": "--json",
    "generate": "join= model= folder= wait_seconds=",
    "job": "to= cluster= recipe= run= out= cluster. --offline",
    "plan": "plan. recipe= run= --json --offline",
    "report": "out= port= --live",
    "serve": "port= host= least= silent_seconds=",
    "sweep": "sweep= sweep. recipe= run.name= --offline",
}
"""What may follow a command that has no config."""
_MULTIRUN = ("-m", "--multirun")
_HELP = ("-h", "--help")
_VERSION = ("-V", "--version", "version")
_USAGE = """\
hfdist COMMAND [flags] [key=value ...]

{commands}

hfdist run FILE.yaml is the recipe that the file names, with it as its config; a run's folder has such a file.
hfdist sft is finetune; hfdist dpo, cpo, simpo, orpo, kto, reward, grpo, rloo, ppo, online_dpo are tune with that task.
hfdist COMMAND --help lists its groups, options and keys; hfdist --version says which one this is.
launch.processes=2 (or auto: the GPUs) starts that many processes; eval "$(hfdist completion bash)" completes all of
them (in zsh, after bashcompinit).
"""


def main() -> None:
    """Run the recipe that the first argument names; end with its exit code."""
    with told_in_one_message(stop_everywhere):
        name, arguments = _read_name(sys.argv[1:])
    recipes = find_recipes()
    if name in _HELP:
        width = max(map(len, recipes))
        lines = (f"  {name:<{width}}  {first_line(path)}" for name, path in recipes.items())
        sys.stdout.write(_USAGE.format(commands="\n".join(lines)))
    elif name in _VERSION:
        sys.stdout.write(f"hfdist {__version__}\n")
    elif sys.argv[1:] == ["completion", "bash"]:
        sys.stdout.write(_COMPLETION)
    elif sys.argv[1:] == ["completion", "query"]:
        _complete(os.environ.get("COMP_LINE", ""), recipes)
    elif name in recipes:
        _call(name, arguments, recipes)
    else:
        with told_in_one_message(stop_everywhere):
            known = [*{**recipes, **NAMES}, RUN, "completion bash"]
            hint = _command_for(name, arguments) or nearest(name, known, "hfdist {}", cutoff=0.7) or "hfdist --help"
            what, found = "there is no such command", " ".join(sys.argv[1:3])
            raise ConfigError(what, where="command line", found=found, allowed=", ".join(known), hint=hint)


def _command_for(name: str, arguments: list[str]) -> str | None:
    """Give the command for a name that other programs have, or that holds one of hfdist's; None: it is not known."""
    if name.endswith((".yaml", ".yml")):
        return f"hfdist run {shlex.quote(name)}"
    # `train_dpo` holds the name of a task.
    parts = [re.sub("[-_]", "", name), *re.split("[-_]", name)]
    part = next((part for part in parts if part in NAMES), None)
    if part is not None:
        return f"hfdist {part}"
    recipe = next((word for word in arguments if word in NAMES), RECIPES[0])
    return HINTS[name].format(name=recipe) if name in HINTS else None


def _read_name(words: list[str]) -> tuple[str, list[str]]:
    """Give the command and its arguments, where a task or a config file may stand for them."""
    name, *arguments = words or [_HELP[0]]
    if name == RUN:
        if arguments[:1] in ([flag] for flag in _HELP):
            return _HELP[0], []
        # Imported here, as the other commands need no reader of config files so early.
        from hfdist.config.cli.own_config import as_recipe

        name, *arguments = as_recipe(arguments[0] if arguments else "", arguments[1:])
    elif name in NAMES:
        name, arguments = NAMES[name][0], arguments if names_config(arguments) else with_task(name, arguments)
    return name, arguments


def _call(name: str, arguments: list[str], recipes: dict[str, Path]) -> None:
    without_multirun = [argument for argument in arguments if argument not in _MULTIRUN]
    if name in RECIPES and without_multirun != arguments:
        # Users of Hydra expect a run for each combination.
        name, arguments = "sweep", ["sweep=grid", f"recipe={name}", *without_multirun]
    sys.argv = [f"{sys.argv[0]} {name}", *arguments]
    beside = recipes[name].parents[1]
    if beside == Path(__file__).resolve().parent:
        package = "hfdist.recipes"
    else:
        # First, since another package may be called so, as torchtune's is. Processes that are started get it, too.
        sys.path.insert(0, str(beside))
        package = "recipes"
    importlib.import_module(f"{package}.{recipes[name].stem}").main()


def _complete(line: str, recipes: dict[str, Path]) -> None:
    """Print what may stand at the end of a command line that begins with `hfdist`."""
    _, *words = line.split(" ")
    if len(words) < 2:
        sys.stdout.write(" ".join([*{**recipes, **NAMES}, RUN]))
    elif words[0] in _WORDS:
        sys.stdout.write(_WORDS[words[0]])
    elif words[0] in recipes or words[0] in NAMES:
        os.environ["COMP_LINE"] = " ".join(["hfdist", *words[1:]])
        _call(NAMES.get(words[0], (words[0],))[0], ["--shell-completion", "query=bash"], recipes)


def find_recipes() -> dict[str, Path]:
    """The shipped recipes by their commands' names: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "recipes", package.parent / "recipes")
    folder = next(folder for folder in folders if folder.is_dir())
    return {path.stem.replace("_", "-"): path for path in sorted(folder.glob("[!_]*.py"))}


def first_line(path: Path) -> str:
    """What a recipe says of itself, for the help of the command."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
