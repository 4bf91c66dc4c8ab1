"""The house rules as tests: sizes, folders, docstrings, banned calls, and what a quick import may load."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "hfdist").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])

MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8

# Ways from data to code, and pickle, which is one.
BANNED_CALLS = {"eval", "exec", "print", "torch.load", "torch.save", "pickle.load", "pickle.loads", "yaml.load",
                "dist.all_gather_object", "dist.broadcast_object_list", "os.system"}  # fmt: skip
# It runs code in processes that have given up all that code could harm.
SANDBOX = "hfdist/rewards/sandbox/__main__.py"


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def name_of(call):
    function, parts = call.func, []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    # A method of a computed value, such as model().eval(), is not the builtin of that name.
    parts.append(function.id if isinstance(function, ast.Name) else "?")
    return ".".join(reversed(parts))


@pytest.fixture(scope="module")
def sources():
    """Place, text and tree of each file."""
    texts = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in SOURCES]
    return [(place, text, ast.parse(text)) for place, text in texts]


def test_functions_are_short_and_files_say_what_they_are_for(sources):
    assert not [place for place, _, tree in sources if not ast.get_docstring(tree)], (
        "the first line says what it is for"
    )
    for place, _, tree in sources:
        for function in functions(tree):
            assert function.end_lineno - function.lineno < MOST_FUNCTION_LINES, (place, function.name)
            arguments = function.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            assert count <= MOST_PARAMETERS, (place, function.name)


def test_nothing_turns_data_into_code(sources):
    for place, _, tree in sources:
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            banned = BANNED_CALLS - ({"exec"} if place == SANDBOX else set())
            assert name_of(call) not in banned, (place, call.lineno)
            for keyword in call.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                assert (keyword.arg, value) not in {("allow_pickle", True), ("shell", True)}, (place, call.lineno)


def test_layouts_are_told_apart_in_one_place(sources):
    # A search names all layouts, and has no model that a Strategy could be asked about.
    apart = ("hfdist/config/", "hfdist/planning/searching/")
    told = {place for place, text, _ in sources if re.search(r"\bSharding\.", text) and not place.startswith(apart)}
    assert told == {"hfdist/strategies/select.py", "hfdist/strategies/deepspeed/deepspeed_config.py"}


def test_parts_of_the_trainer_take_its_handle(sources):
    assert not [place for place, text, _ in sources if "trainer: Any" in text], "hfdist/trainer/training.py, or less"


def test_ranks_are_read_in_one_place(sources):
    reads = [place for place, text, _ in sources if 'environ["RANK"]' in text or 'environ.get("RANK"' in text]
    assert {place for place in reads if not place.startswith("hfdist/testing.py")} <= {"hfdist/topology.py"}


def test_the_text_of_the_project_speaks_of_the_project_alone():
    words = ("/work/", "pypi.org", "http://localhost")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]
    for path in [*SOURCES, *(ROOT / "conf").rglob("*.yaml"), *pages, ROOT / "Makefile"]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in words if word in text], path
