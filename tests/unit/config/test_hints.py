"""Hints are followed: put into the command, each gets past its mistake; and no text names a key that does not exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import hfdist
from hfdist.config.checks.preflight import check_run
from hfdist.config.cli.command import _parse_flags
from hfdist.config.composition.aliases import OVERRIDES, REASONS
from hfdist.config.composition.compose import compose_config
from hfdist.config.schema import all_keys, find_key
from hfdist.errors import HfdistError
from hfdist.models.architecture import check_fields

HUNDRED = "data=texts.jsonl data.cache_dir=cache"
# Commands without the recipe; `2:` before one starts two processes.
MISTAKES = [
    "--max_steps 5",
    "--max-steps=5",
    "--learning_rate 1e-3",
    "optimizer.lrr=1e-3",
    "optimizer.schedule=cosin",
    "strategy=zero4",
    "report.to=tensorbord",
    "report.to=[wandb,tensorbord]",
    "report.to=none",
    "train.global_batch_size=12",
    "2:strategy=ddp train.global_batch_size=24",
    "2:strategy=ddp data.lanes=7",
    "train.micro_batch_size=64",
    "train.eval_every=3 checkpoint.keep_best=true",
    "train.eval_every=3 checkpoint.keep_best=true checkpoint.keep_every=1000",
    "train.eval_every=3 evaluate.export=best checkpoint=none",
    "evaluate.patience=2",
    "checkpoint.keep_every=750",
    "optimizer.warmup_steps=100",
    "train.recompute=cheap",
    "strategy.offload=cpu",
    "data=texts.jsnl",
    "data.eval_sources.v.path=texts.jsonl",
    "model.type=lama",
    "model.config.hiden_size=64",
    "model.config.num_attention_heads=7",
    "model.config.num_attention_heads=3",
    "model.attention=flash_attention_2",
    f"{HUNDRED} data.sources.files.text=txt",
    f"{HUNDRED} data.lanes=256",
    f"2:strategy=ddp {HUNDRED} data.lanes=256",
]


def attempt(command, monkeypatch, *, opens_data):
    """Compose and check as a recipe does; open the data of commands that name some."""
    num_processes, _, command = command.rpartition(":") if re.match(r"\d:", command) else ("1", "", command)
    monkeypatch.setenv("WORLD_SIZE", num_processes)
    flags = _parse_flags(shlex.split(command))
    config = compose_config(flags.overrides)
    check_run(config)
    check_fields(config.model)
    if opens_data:
        from hfdist.data import open_corpus

        open_corpus(config.data)


def failure(command, monkeypatch):
    try:
        attempt(command, monkeypatch, opens_data=HUNDRED in command)
    except HfdistError as error:
        return error
    return None


def follow(command, hint):
    """Put the first overrides that a hint names into a command, in place of those of the same keys, and of flags."""
    words = []
    for word in shlex.split(re.split(r",? or |;|, ", hint)[0]):
        if not re.match(r"[+~]?[\w./]+=", word):
            break
        words.append(word)
    assert words, f"nothing to follow in: {hint}"
    keys = {word.partition("=")[0] for word in words}
    launch, _, rest = command.rpartition(":") if re.match(r"\d:", command) else ("", "", command)
    misspelt = {"optimizer.lrr", "model.config.hiden_size"}
    given = []
    for word in shlex.split(rest):
        key = word.partition("=")[0]
        if (
            "=" in word
            and not word.startswith("-")
            and key not in keys | misspelt
            and not (key == "data" and "data.sources.files.path" in keys)
        ):
            given.append(word)
    if "data.sources.files.path" in keys:
        given.append("data=files")
    return (f"{launch}:" if launch else "") + shlex.join([*given, *words])


@pytest.mark.parametrize("command", MISTAKES)
def test_a_hint_that_is_followed_gets_past_the_mistake(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "a text of some words"}\n' * 100)
    error = failure(command, monkeypatch)
    assert error is not None
    assert error.hint is not None, error
    changed = follow(command, error.hint)
    after = failure(changed, monkeypatch)
    assert after is None or (after.what, after.where) != (error.what, error.where), f"{changed}\n{after}"


SECTIONS = "|".join(sorted({name.partition(".")[0] for name in all_keys()}))
KEY = re.compile(rf"(?<![\w./])({SECTIONS})((?:\.[a-z_*]\w*|\.[A-Z]+\b)+)(?=[=\s,;:.)`']|$)")
# Not keys: files and folders.
OTHERS = {"model.safetensors", "config.json", "train.jsonl", "data.jsonl"}


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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for value in [value for name, value in named_values(node) if name in PARTS]:
                texts = [p.value for p in ast.walk(value) if isinstance(p, ast.Constant) and isinstance(p.value, str)]
                yield from ((f"{path.name}:{value.lineno}", text) for text in texts)
    yield from (("aliases.py", text) for text in [*OVERRIDES.values(), *REASONS.values()])


def exists(name):
    if name in OTHERS or find_key(name) is not None:
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
