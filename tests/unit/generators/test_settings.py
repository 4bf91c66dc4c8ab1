"""What a generator is told of its run, through a file."""

from hfdist.config.composition.compose import compose_config
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.tune.generators.settings import Settings


def test_settings_come_back_as_they_were(tmp_path):
    words = ["task=grpo", "data.sources.files.path=/data", "task.generators=1", "optimizer.lr=1e-5"]
    config = compose_config([*words, r"model.name=/\${x}", "task.rewards={length: 1.0}"], name="tune")
    config.model.trust_remote_code = True
    limits = GenerationLimits(end_ids=frozenset({1, 2}), max_new_tokens=8, most_tokens=64)
    told = Settings(config=config, vocabulary=300, limits=limits)
    told.write(tmp_path / "settings.json")
    assert Settings.read(tmp_path / "settings.json") == told
