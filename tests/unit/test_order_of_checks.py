"""A config that is wrong in itself is told so, before it is compared with the checkpoints of an old run."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import CheckpointError, ConfigError, DataError
from hfdist.run import builder
from recipes.pretrain import main


@pytest.mark.parametrize(
    ("overrides", "kind", "where"),
    [
        (["model.config.hiden_size=64"], ConfigError, "model.config.hiden_size"),
        (["model.config.num_attention_heads=7"], ConfigError, "model.config"),
        (["data=files", "data.sources.files.path=missing.jsonl"], ConfigError, "data.sources.files.path"),
        (["data.sources.files.text=body"], DataError, "texts.jsonl"),
        (["data.sequence_length=4096"], ConfigError, "data.sequence_length"),
        (["train.arguments.no_such=1"], ConfigError, "train.arguments.no_such"),
        ([], CheckpointError, None),
    ],
)
def test_the_old_run_comes_last(overrides, kind, where, tmp_path, monkeypatch):
    def compare(config):
        raise CheckpointError("the config has changed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builder, "check_resume", compare)
    monkeypatch.setattr(builder, "set_up_logging", lambda topology: None)
    (tmp_path / "texts.jsonl").write_text('{"text": "a text of some words"}\n' * 200)
    given = ["model=tiny", "data=texts.jsonl", "data.cache_dir=cache", "data.eval_fraction=0", "run.dir=run"]
    with pytest.raises(kind) as caught:
        main.__wrapped__(compose_config([*given, *overrides]))
    if where is not None:
        assert where in caught.value.where
    assert not (tmp_path / "run").exists()
