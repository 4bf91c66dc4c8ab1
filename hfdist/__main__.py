"""The command `hfdist`: `hfdist pretrain ...` is the recipe of that name, with the same flags and overrides."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from pathlib import Path

from hfdist.errors import ConfigError

_USAGE = """\
hfdist COMMAND [flags] [key=value ...]

{commands}

hfdist COMMAND --help lists its groups, options and keys; launch.processes=2 (or auto: the GPUs) starts that many processes.
"""


def main() -> None:
    """Run the recipe that the first argument names; end with its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    recipes = find_recipes()
    if name in ("-h", "--help"):
        width = max(map(len, recipes))
        lines = (f"  {name:<{width}}  {_first_line(path)}" for name, path in recipes.items())
        sys.stdout.write(_USAGE.format(commands="\n".join(lines)))
        return
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1, cutoff=0.5)
        error = ConfigError(
            "there is no such command",
            where="command line",
            found=name,
            allowed=", ".join(recipes),
            hint=f"hfdist {near[0] if near else '--help'}",
        )
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
    package = "recipes" if recipes[name].parents[1] != Path(__file__).parent else "hfdist.recipes"
    importlib.import_module(f"{package}.{name}").main()


def find_recipes() -> dict[str, Path]:
    """The shipped recipes by name: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    folders = (package / "recipes", package.parent / "recipes")
    folder = next(folder for folder in folders if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
