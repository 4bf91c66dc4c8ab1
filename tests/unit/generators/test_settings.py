"""What a generator is told of its run, through a file."""

from dataclasses import replace

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.errors import ConfigError
from hfdist.messages.message import Message, NotAMessageError
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.tune.generators.settings import Settings

GIVEN = (
    "task=grpo",
    r"model.name=/\${x}",
    "data.sources.files.path=/data",
    "task.generators=1",
    "task.rewards={length: 1.0}",
)


def test_settings_come_back_as_they_were(tmp_path):
    config = compose_config([*GIVEN, "optimizer.lr=1e-5"], name="tune")
    config.model.trust_remote_code = True
    limits = GenerationLimits(end_ids=frozenset({1, 2}), max_new_tokens=8, most_tokens=64)
    told = Settings(config=config, vocabulary=300, limits=limits, are_chats=True, tools=[{"type": "function"}])
    told.write(tmp_path / "settings.json")
    read = Settings.read(tmp_path / "settings.json")
    assert replace(read, config=config) == told
    assert (read.config.model, read.config.adapter, read.config.task) == (config.model, config.adapter, config.task)
    # Another machine has folders of its own, and runs no code of the model's.
    own = {"model": tmp_path / "model", "adapter": None, "tokenizer": None}
    moved = Settings.from_message(Message(told.to_message())).at(tmp_path, **own)
    assert (moved.vocabulary, moved.limits, moved.config.task) == (told.vocabulary, told.limits, config.task)
    assert (moved.config.model.name, moved.config.model.tokenizer.name) == (str(tmp_path / "model"), None)
    assert not moved.config.model.trust_remote_code


def test_another_machine_needs_no_path_of_the_run(tmp_path):
    """The template is in the tokenizer that it gets; nothing else of these is read there."""
    template, checkpoint = tmp_path / "chat.jinja", tmp_path / "step-00000001"
    template.write_text("{{ messages }}")
    checkpoint.mkdir()
    own = f"data.chat.template={template}", f"checkpoint.resume={checkpoint}", f"run.dir={tmp_path}"
    chat = "data.chat.template_arguments={enable_thinking: false}"
    config = compose_config([*GIVEN, *own, chat, "train.seed=7"], name="tune")
    limits = GenerationLimits(end_ids=frozenset({1}), max_new_tokens=8, most_tokens=64)
    told = Settings(config=config, vocabulary=300, limits=limits).to_message()
    assert str(tmp_path) not in str(told)
    template.unlink()
    checkpoint.rmdir()
    read = Settings.from_message(Message(told)).config
    assert read.data.chat == replace(config.data.chat, template=None)
    assert (read.train.seed, read.data.sequence_length) == (7, config.data.sequence_length)


def test_a_run_does_not_switch_code_on():
    limits = GenerationLimits(end_ids=frozenset({1}), max_new_tokens=8, most_tokens=64)
    told = Settings(config=compose_config([*GIVEN], name="tune"), vocabulary=9, limits=limits).to_message()
    told["config"]["model"]["trust_remote_code"] = True
    assert not Settings.from_message(Message(told)).config.model.trust_remote_code


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("vocabulary", "300", NotAMessageError),
        ("limits", {"max_new_tokens": 1, "end_ids": ["x"], "most_tokens": None, "where": ""}, NotAMessageError),
        ("config", {"model": {"trust_remote_code": "yes"}}, ConfigError),
        ("config", {"__class__": 1}, ConfigError),
    ],
)
def test_what_no_run_says_is_refused(key, value, error):
    limits = {"max_new_tokens": 1, "end_ids": [1], "most_tokens": None, "where": "task.max_new_tokens"}
    told = {"config": to_values(compose_config([*GIVEN], name="tune")), "vocabulary": 9, "limits": limits}
    told |= {"are_chats": False, "tools": []}
    Settings.from_message(Message(told))
    with pytest.raises(error):
        Settings.from_message(Message(told | {key: value}))
