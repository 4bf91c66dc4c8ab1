"""What a generator is told of its run, through a file."""

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
    assert Settings.read(tmp_path / "settings.json") == told
    # Another machine has folders of its own, and runs no code of the model's.
    own = {"model": tmp_path / "model", "adapter": None, "tokenizer": None}
    moved = Settings.from_message(Message(told.to_message())).at(tmp_path, **own)
    assert (moved.vocabulary, moved.limits, moved.config.task) == (told.vocabulary, told.limits, config.task)
    assert (moved.config.model.name, moved.config.model.tokenizer.name) == (str(tmp_path / "model"), None)
    assert not moved.config.model.trust_remote_code


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
