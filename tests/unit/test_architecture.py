"""The house rules as tests: sizes, docstrings, banned calls, and what a quick import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "hfdist").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])

MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8

# Ways from data to code, and pickle, which is one.
BANNED_CALLS = {"eval", "exec", "print", "torch.load", "torch.save", "pickle.load", "pickle.loads", "yaml.load",
                "dist.all_gather_object", "dist.broadcast_object_list", "os.system"}  # fmt: skip


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


@pytest.fixture(params=SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def source(request):
    return request.param


def test_functions_are_short_and_files_say_what_they_are_for(source):
    text = source.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the first line says what the file is for"
    for function in functions(tree):
        assert function.end_lineno - function.lineno < MOST_FUNCTION_LINES, function.name
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        assert count <= MOST_PARAMETERS, function.name


def test_nothing_turns_data_into_code(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [f"line {call.lineno}: {name_of(call)}" for call in calls if name_of(call) in BANNED_CALLS]
    for call in calls:
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            assert (keyword.arg, value) not in {("allow_pickle", True), ("shell", True)}


def test_layouts_are_told_apart_in_one_place(source):
    if source.name in ("select.py", "deepspeed_config.py") or "config" in source.parts:
        return
    assert "Sharding." not in source.read_text(encoding="utf-8")


def test_ranks_are_read_in_one_place(source):
    if source.name == "topology.py" or "testing" in source.parts:
        return
    text = source.read_text(encoding="utf-8")
    assert 'environ["RANK"]' not in text
    assert 'environ.get("RANK"' not in text


def test_the_config_system_loads_no_torch():
    code = (
        "import sys, hfdist, hfdist.config.command, hfdist.config.run, hfdist.topology\n"
        "heavy = {'torch', 'transformers', 'datasets', 'deepspeed', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_text_of_the_project_speaks_of_the_project_alone():
    words = ("/work/", "pypi.org", "http://localhost")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]
    for path in [*SOURCES, *(ROOT / "conf").rglob("*.yaml"), *pages, ROOT / "Makefile"]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in words if word in text], path
