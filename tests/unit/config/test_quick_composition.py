"""Most tests compose quickly, and as users do."""

import shlex

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from tests.quick_composition import quick_composition

COMPOSES_WHOLE = True


@pytest.mark.parametrize(
    "line",
    [
        "",
        "model=tiny",
        "model=tiny strategy=fsdp2 strategy.tensor=2 train.max_steps=6 optimizer.lr=1e-2 data.workers=0 report=quiet",
        "+experiment=demo run.name=a train.arguments.torch_empty_cache_steps=10",
        "data=mixture '+data.sources.a={path: x}' data.sources.b.path=y ~optimizer.warmup_fraction",
        "model.config={hidden_size: 64, attention_bias: true} ++model.config.num_key_value_heads=1",
        "model.config.vocab_size=${data.sequence_length}",
        "model=tinny",
        "optimizer.lrr=1e-3",
        "model=tiny ~train.max_step",
        "train.max_steps=many",
        "+optimizer.lr=1 report.to={a: 1}",
        "run.dir=${run.nme}",
        "run.dir=${oc.env:HOME}",
        "run.name=???",
    ],
)
def test_most_tests_compose_as_users_do(line):
    """They merge the same files once: `tests/quick_composition.py`."""

    def found():
        try:
            return compose_config(shlex.split(line))
        except ConfigError as error:
            return str(error)

    whole = found()
    with pytest.MonkeyPatch.context() as patch:
        quick_composition(patch)
        assert found() == found() == whole
