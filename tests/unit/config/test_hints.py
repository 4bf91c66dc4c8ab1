"""Hints are followed to the end of their chains; and no text names a key that does not exist."""

import ast
import re
import sys
from pathlib import Path

import pytest

import hfdist
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.composition.other_trainers import OVERRIDES, REASONS
from hfdist.config.schema import all_keys, find_key
from hfdist.errors import HfdistError
from tests.marks import many
from tests.unit.config.hint_chains import Chains
from tests.unit.config.mistaken_lines import LINES

CONFIG = Path(hfdist.__file__).parent / "config"
ERRORS = ("ConfigError", "conflict", "misfit", "_no_option", "refuse")
"""What makes a message."""
OTHERS = {
    # Of a file, which is to be changed, or of what is beside the config.
    "refuse_resolver": "only the shell can give the value of a variable",
    "own_config.py": "a file is named, or mended in an editor",
    "finished.py": "the files of a run that has ended",
    "unnamed.py": "twenty folders of runs that have no name",
    "defaults_list.py": "a config file is mended in an editor",
    "_not_listed": "a defaults list is mended in an editor",
    "_chosen_twice": "a defaults list is mended in an editor",
    # Of values that only files have.
    "explain_interpolation": "the value is to be written out",
}


def make_files(folder):
    """What the lines name."""
    (folder / "texts.jsonl").write_text('{"text": "a text of some words"}\n' * 100)
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 100)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 100)
    (folder / "functions.jsonl").write_text('{"query": "a", "positive": "b"}\n' * 100)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' * 100)
    for name in (
        "folder/model",
        "adapter",
        "texts",
        "web",
        "unreadable",
        "runs/first/checkpoints/step-00000001",
        "runs/first/model",
        "made/tokens/tokenizer",
    ):
        (folder / name).mkdir(parents=True)
    for name in (
        "val.jsonl",
        "texts/a.txt",
        "web/a.parquet",
        "adapter/adapter_config.json",
        "folder/config.json",
        "runs/first/model/config.json",
        "made/tokens/00000.tokens",
    ):
        (folder / name).touch()
    (folder / "own").mkdir()
    (folder / "own/mine.yaml").write_text("defaults: [pretrain, optimzer: adamw]\n")
    (folder / "unreadable" / "run.json").write_text("{")
    (folder / "runs/first/config.yaml").write_text(to_yaml(compose_config(["run.name=first"])))


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The chains of hints, each followed once in a folder with all files, and the places that have made messages."""
    places = set()

    before = HfdistError.__init__

    def note(self, *args, **options):
        before(self, *args, **options)
        frame = sys._getframe(1)
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(CONFIG):
                places.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back

    folder = tmp_path_factory.mktemp("lines")
    make_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(HfdistError, "__init__", note)
        yield Chains(), places


PARTS_OF_LINES = 12


@pytest.mark.parametrize("part", [0, *map(many, range(1, PARTS_OF_LINES))])
def test_each_proposal_of_each_hint_leads_to_a_config_that_passes(followed, part):
    chains, _ = followed
    problems = [problem for line in LINES[part::PARTS_OF_LINES] for problem in chains.failures(line)]
    assert not problems, "\n\n".join(problems)


def messages_with_overrides():
    """The file, the lines and the name of the function of each message whose hint may hold an override."""
    for path in sorted(CONFIG.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            hints = [value for node in ast.walk(function) for name, value in named_values(node) if name == "hint"]
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ERRORS):
                    continue
                given = [keyword.value for keyword in call.keywords if keyword.arg == "hint"]
                texts = hints if any(isinstance(value, ast.Name) for value in given) else given
                if call.func.id in ("misfit", "_no_option", "refuse") or any(map(may_be_override, texts)):
                    yield path, call, function.name


def may_be_override(hint):
    parts = list(ast.walk(hint))
    calls = any(isinstance(part, ast.Call) and getattr(part.func, "id", "") in CALLED for part in parts)
    return calls or any(isinstance(part, ast.Constant) and "=" in str(part.value) for part in parts)


CALLED = ("_near", "_hint_for_unknown", "_hint_for_value")


def test_each_message_that_proposes_an_override_has_a_line(followed):
    """A new one joins the lines, or says in OTHERS why it cannot."""
    chains, places = followed
    assert [line for line in LINES if chains.check(line) is None] == []
    missing = [
        f"{path.relative_to(CONFIG)}:{call.lineno} in {name}: {ast.unparse(call)[:100]}"
        for path, call, name in messages_with_overrides()
        if not any(file == str(path) and call.lineno <= line <= call.end_lineno for file, line in places)
        and not {path.name, name} & OTHERS.keys()
    ]
    assert not missing, "\n".join(missing)


SECTIONS = "|".join(sorted({name.partition(".")[0] for name in all_keys()}))
KEY = re.compile(rf"(?<![\w./])({SECTIONS})((?:\.[a-z_*]\w*|\.[A-Z]+\b)+)(?=[=\s,;:.)`']|$)")
# Not keys: files and folders.
FILES = {"model.safetensors", "config.json", "train.jsonl", "data.jsonl"}


PARTS = ("hint", "allowed")


def named_values(node):
    """The value of each argument and variable by its name."""
    if isinstance(node, ast.keyword):
        yield node.arg, node.value
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=True) if several else [(target, node.value)]
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def texts_of_errors():
    """Every text that stands in a hint or among what is allowed, with its place."""
    for path in sorted(Path(hfdist.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(part in text for part in PARTS) else ():
            for value in [value for name, value in named_values(node) if name in PARTS]:
                texts = [p.value for p in ast.walk(value) if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                yield from ((f"{path.name}:{value.lineno}", text) for text in texts)
    yield from (("other_trainers.py", text) for text in [*OVERRIDES.values(), *REASONS.values()])


def exists(name):
    if name in FILES or find_key(name) is not None:
        return True
    if name.endswith(".*"):
        return find_key(name.removesuffix(".*")) is not None
    parts = name.split(".")
    above = (find_key(".".join(parts[:length])) for length in range(1, len(parts)))
    return any(key is not None and key.is_free for key in above)


def test_every_key_that_a_hint_names_exists():
    named = [(place, found[0]) for place, text in texts_of_errors() for found in KEY.finditer(text)]
    assert len(named) > 150
    assert [(place, name) for place, name in named if not exists(name)] == []


def test_a_list_of_texts_may_be_its_one_item():
    config = compose_config(["report.to=wandb", "train.freeze=model.embed*", "data.quarantine=[]"])
    assert (config.report.to, config.train.freeze) == (["wandb"], ["model.embed*"])


def test_the_table_of_trackers_is_that_of_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from hfdist.config.run import TRACKERS

    assert set(TRACKERS) == set(INTEGRATION_TO_CALLBACK)
