"""Who calls `make_strategy` or `Trainer` from Python reads of arguments, not of keys of a config."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

import hfdist
from hfdist.config.composition.other_trainers import OVERRIDES, REASONS
from hfdist.config.composition.python_words import in_python
from hfdist.errors import ConfigError
from hfdist.strategies.from_python import make_strategy
from hfdist.trainer.constructor_arguments import check_count, check_half_weights
from hfdist.trainer.engine_setup import find_strategy
from tests.unit.config.test_checks import CONTRADICTIONS
from tests.unit.tiny import llama

YAML_ONLY = re.compile(
    r"(?<!deepspeed\.)\b(strategy|train|data|optimizer|launch|run|checkpoint|report|adapter|evaluate|export|task)\.[a-z_]+\b(?!\()"
    r"|\bstrategy=\w|\bcheckpoint=|\b(true|false|null)\b|model\.(name|dtype|attention)\b|command line"
)
PACKAGE = Path(hfdist.__file__).parent


def message(name=None, **arguments):
    """What `make_strategy` says of them, all of it in Python."""
    with pytest.raises(ConfigError) as caught:
        make_strategy(*[] if name is None else [name], **{"global_batch_size": 8} | arguments)
    assert not YAML_ONLY.search(str(caught.value)), str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("name", "arguments", "where", "hint"),
    [
        ("fsdp3", {}, "make_strategy(...)", '"fsdp2"'),
        ("fsdp2", {}, "make_strategy(data)", "torchrun --nproc-per-node 2"),
        (3, {}, "make_strategy(...)", "fsdp2"),
        (None, {"global_batch_size": None}, "make_strategy(global_batch_size)", "global_batch_size=8"),
        (None, {"tp_size": 2}, "make_strategy(tp_size)", "tensor=2"),
        (None, {"batch_size": 4}, "make_strategy(batch_size)", "global_batch_size=4"),
        (None, {"shardin": "zero2"}, "make_strategy(shardin)", "sharding='zero2'"),
        (None, {"sharding": "zer2"}, "make_strategy(sharding)", 'sharding="zero2"'),
        (None, {"pipeline": "two"}, "make_strategy(pipeline)", None),
        (None, {"pipeline": 0}, "make_strategy(pipeline)", None),
        (None, {"pipeline": [2]}, "make_strategy(pipeline)", None),
        (None, {"data": "${oc.env:HOME}"}, "make_strategy(data)", None),
        (None, {"deepspeed": {"a": "${oc.env:HOME}"}}, "make_strategy(deepspeed)", None),
        (None, {"blocks_per_stage": 3}, "make_strategy(blocks_per_stage)", None),
        (None, {"global_batch_size": object()}, "make_strategy(global_batch_size)", None),
        (None, {"sequence_length": "long"}, "make_strategy(sequence_length)", None),
        (None, {"micro_batch_size": 16}, "make_strategy(global_batch_size)", "micro_batch_size=8"),
        (None, {"max_grad_norm": 0}, "make_strategy(max_grad_norm)", None),
        (None, {"precision": "fp8"}, "make_strategy(precision)", 'precision="bf16"'),
        (None, {"compression": "bf16"}, "make_strategy(compression)", 'compression="none"'),
        (None, {"sharding": "zero2", "deepspeed": {"train_batch_size": 7}}, "train_batch_size)", "global_batch_size"),
        (None, {"sharding": "zero2", "deepspeed": {"optimizer": {"type": "Lamb"}}}, "type)", "args.optim"),
        (None, {"pipeline": 2, "sharding": "zero3"}, "make_strategy(sharding)", 'sharding="zero1"'),
    ],
)
def test_a_mistake_in_an_argument_names_the_argument(name, arguments, where, hint):
    said = message(name, **arguments)
    assert said.where.endswith(where)
    assert hint is None or hint in said.hint


@pytest.mark.parametrize("alias", [name for name in (*OVERRIDES, *REASONS) if name.isidentifier()])
def test_a_name_of_another_trainer_is_no_argument(alias):
    # Of the rest of a run a strategy knows nothing, but for what these are called there.
    with pytest.raises(ConfigError) as caught:
        make_strategy(global_batch_size=8, **{alias: 2})
    assert caught.value.where == f"make_strategy({alias})"


LAYOUTS = [
    dict(word.split("=") for word in overrides)
    for overrides, *_ in CONTRADICTIONS
    if all(re.fullmatch(r"strategy(\.\w+)?=\w+|train\.precision=\w+", word) for word in overrides)
]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_a_contradiction_is_told_in_arguments(keys):
    values = {key.rpartition(".")[2]: int(value) if value.isdecimal() else value for key, value in keys.items()}
    message(values.pop("strategy", None), **{"reshard": True} if values.pop("reshard", None) else {}, **values)


@pytest.mark.parametrize("strategy", ["fsdp3", "fsdp2", 3, {"pipeline": 2}])
def test_a_strategy_by_name_is_told_in_arguments_too(strategy, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError) as caught:
        find_strategy(strategy, {"args": args})
    assert not YAML_ONLY.search(str(caught.value)), str(caught.value)


def test_a_strategy_by_name_takes_the_sizes_of_the_arguments(tmp_path):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.5, **sizes)
    made, arguments = find_strategy("single", {"args": args})
    assert (made.batch.global_batch_size, made.batch.micro_batch_size) == (6, 2)
    assert arguments["args"].learning_rate == 0.5
    with pytest.raises(ConfigError, match="takes the sizes of the training arguments"):
        find_strategy("single", {})


OF_TRAINER = tuple(
    f"trainer/{name}.py"
    for name in ("constructor_arguments", "engine_setup", "hooks", "named_arguments", "whole_model")
)
TOLD = ("strategies", "pipeline", "topology.py", "config/batch.py", *OF_TRAINER)
"""Where the messages of a Trainer's constructor come from."""


def texts():
    """The texts of errors there, with X for what is put in."""
    files = [
        file for place in TOLD for file in ([PACKAGE / place], (PACKAGE / place).rglob("*.py"))[place[-3:] != ".py"]
    ]
    for file in files:
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                said = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
                said = node.value
            else:
                continue
            yield file.relative_to(PACKAGE), said


def test_each_text_of_an_error_can_be_said_in_python():
    # A strategy from Python has as many lanes as data ranks.
    said = ((file, text, in_python(text)) for file, text in texts() if not text.startswith("data.lanes"))
    left = [f"{file}: {text} -> {translated}" for file, text, translated in said if YAML_ONLY.search(translated)]
    assert not left, "\n".join(left)


def test_a_mixin_after_its_class_is_refused_with_the_order_that_works():
    with pytest.raises(ConfigError) as caught:
        type("Mine", (Trainer, hfdist.DistributedTrainerMixin), {})
    assert caught.value.hint == "class Mine(DistributedTrainerMixin, Trainer)"


def test_float16_is_refused_where_gradients_are_scaled_in_float32(tmp_path):
    model, args = llama().half(), TrainingArguments(str(tmp_path), fp16=True, use_cpu=True)
    with pytest.raises(ConfigError, match="fp16=True trains weights of float32"):
        hfdist.Trainer(model, args, strategy="single")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    check_half_weights(model, args)


def test_processes_that_the_arguments_do_not_count_are_refused(tmp_path):
    strategy = make_strategy(global_batch_size=8)
    args = TrainingArguments(str(tmp_path), use_cpu=True, **strategy.training_arguments())
    with pytest.raises(ConfigError, match="each process would train alone") as caught:
        check_count(args, replace(strategy.topology, data=2))
    assert "use_cpu=True" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("such as strategy=single strategy.pipeline=1", 'such as make_strategy("single", pipeline=1)'),
        ("strategy=fsdp2 is one", 'make_strategy("fsdp2") is one'),
    ],
)
def test_a_preset_and_its_degrees_are_one_call(text, said):
    assert in_python(text) == said


def test_a_name_that_is_not_there_says_the_nearest():
    for name, words in (("make_stategy", "hfdist.make_strategy"), ("load_rewards", "hfdist.rewards.load_rewards")):
        with pytest.raises(AttributeError, match=f"did you mean {words}"):
            getattr(hfdist, name)
