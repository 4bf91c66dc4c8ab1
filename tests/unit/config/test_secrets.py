"""No secret gets into a config: not from the command line, a file or Python, and no message repeats it."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values, to_yaml
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError

SHAPED = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    "override",
    [
        "+train.arguments.hub_token=pw1",
        "train.arguments.hub_token=pw1",
        "train.arguments={accelerator_config: {}, hub_token: pw1}",
        "hub_token=pw1",
        "train.argumens.hub_token=pw1",
        "model.config.api_key=[pw1",
        f"run.name={SHAPED}",
        f"evaluate.prompts=[a,{SHAPED}]",
        f"{SHAPED}",
        "model.name=https://ann:pw1@host/model",
    ],
)
def test_on_the_command_line(override):
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert "pw1" not in str(caught.value)
    assert SHAPED not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["hub_token: pw1", f"note: {SHAPED}", "hub_token: pw1: x", "nothing: {password: 47110815}"],
    ids=list("abcd"),
)
def test_in_a_file(tmp_path, line):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text(f"defaults: [default]\narguments:\n  {line}\n")
    with pytest.raises(ConfigError) as caught:
        compose_config(["train=mine"], extra_dir=tmp_path)
    assert "mine.yaml, line 3" in caught.value.where
    for secret in ("pw1", SHAPED, "47110815"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("hub_token", "pw1"), ("run_tags", ("a", SHAPED))])
def test_in_python(name, value):
    config = RunConfig()
    config.train.arguments[name] = value
    for write in (to_yaml, to_values):
        with pytest.raises(ConfigError, match="would be written"):
            write(config)


def test_what_only_sounds_like_one_is_fine():
    config = compose_config(
        ["model.config.image_token='<image>'", "train.arguments.hub_token=null", "data.token_cache_bytes=1000000000"]
    )
    assert to_values(config)["model"]["config"]["image_token"] == "<image>"
