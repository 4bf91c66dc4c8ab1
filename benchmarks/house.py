"""How large and how tangled the code is, in the work tree and beside it in a git revision, as Markdown.

python -m benchmarks.house [REV]
"""

import argparse
import ast
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from io import BytesIO
from pathlib import Path

from benchmarks.table import markdown

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("code", "import", "docstring", "comment", "blank")
MOST_FUNCTION_LINES = 60
REPEATED_LINES = 6


def kinds_of_lines(text: str, tree: ast.Module) -> list[str]:
    """Give the kind of each line. A docstring is any text that stands alone, also below an attribute."""
    kinds = ["comment" if line.lstrip().startswith("#") else "code" if line else "blank" for line in text.splitlines()]
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            kind = "docstring" if is_text else "import"
            kinds[node.lineno - 1 : node.end_lineno] = [kind] * (node.end_lineno - node.lineno + 1)
    return kinds


def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Give for each module the modules that it imports when it is loaded itself."""
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        pairs = [(node.module, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
        graph[name] = {inner if inner in trees else module for module, inner in pairs} & trees.keys()
    return graph


def count_circles(graph: dict[str, set[str]]) -> int:
    """Count the import circles: how many imports must go until there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        first, second, *_ = error.args[1]
        graph[second].discard(first)
        return 1 + count_circles(graph)
    return 0


def count_repeats(texts: list[list[str]]) -> int:
    """Count the stretches of six or more lines that stand elsewhere before; blank lines and imports do not count."""
    seen: set[tuple[str, ...]] = set()
    count = 0
    for lines in texts:
        was_seen = False
        for begin in range(len(lines) - REPEATED_LINES + 1):
            window = tuple(lines[begin : begin + REPEATED_LINES])
            count += window in seen and not was_seen
            was_seen = window in seen
            seen.add(window)
    return count


def measure(root: Path) -> tuple[dict[str, Counter[str]], dict[str, str]]:
    """Give the lines of each room of hfdist/ by kind, with its files, and the other figures by what they count."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    trees, codes, folders, num_long = {}, [], Counter[str](), 0
    for path in sorted((root / "hfdist").rglob("*.py")):
        place, text = path.relative_to(root), path.read_text(encoding="utf-8")
        tree = trees[".".join(place.with_suffix("").parts).removesuffix(".__init__")] = ast.parse(text)
        kinds = kinds_of_lines(text, tree)
        room = rooms["/".join(place.parts[:2]) if len(place.parts) > 2 else "hfdist/*.py"]
        room.update([*kinds, "files"])
        folders[place.parent.as_posix()] += 1
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        num_long += sum(node.end_lineno - node.lineno >= MOST_FUNCTION_LINES for node in functions)
        pairs = zip(text.splitlines(), kinds, strict=True)
        codes.append([line.strip() for line, kind in pairs if kind not in ("blank", "import")])
    (folder, most), *_ = folders.most_common(1)
    figures = {
        "most files in one folder": f"{most} ({folder})",
        f"functions over {MOST_FUNCTION_LINES} lines": str(num_long),
        "import circles": str(count_circles(imports(trees))),
        f"repeated stretches of {REPEATED_LINES} or more lines": str(count_repeats(codes)),
    }
    for name in ("tests", "proofs", "recipes", "README.md", "ARCHITECTURE.md"):
        files = [root / name] if name.endswith(".md") else (root / name).rglob("*.py")
        figures[f"lines of {name}"] = f"{sum(len(path.read_text().splitlines()) for path in files):,}"
    return rooms, figures


def main(revision: str | None = None) -> None:
    """Print both tables; with a revision, its figures stand in the last column."""
    rooms, figures = measure(ROOT)
    old_rooms, old_figures, at = {}, {}, [] if revision is None else [revision]
    if revision is not None:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
            old_rooms, old_figures = measure(Path(folder))
    rooms["all"], old_rooms["all"] = sum(rooms.values(), Counter()), sum(old_rooms.values(), Counter())
    rows = []
    for name in sorted(rooms.keys() | old_rooms.keys(), key=lambda name: (name == "all", name)):
        now, old = rooms.get(name, Counter()), old_rooms.get(name, Counter())
        counts = [sum(now[kind] for kind in KINDS), *(now[kind] for kind in (*KINDS, "files"))]
        rows.append([name, *(f"{n:,}" for n in [*counts, *(sum(old[kind] for kind in KINDS) for _ in at)])])
    header = ["room", "lines", *KINDS, "files", *(f"lines of {revision}" for revision in at)]
    print(markdown(header, rows), end="\n\n")
    print(markdown(["", "now", *at], [[what, now, *(old_figures[what] for _ in at)] for what, now in figures.items()]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", metavar="REV", help="a git revision to compare with")
    main(parser.parse_args().revision)
