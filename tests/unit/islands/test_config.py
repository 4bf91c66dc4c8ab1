"""Keys of islands that their method does not read are refused."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError

ADDRESS = "islands.address=localhost:1"


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        (["islands=parameter_server", "islands.every=5"], "islands.every", "islands=diloco"),
        (["islands=diloco", "islands.staleness=null"], "islands.staleness", "islands=parameter_server"),
        (["islands=diloco", "islands.proximal=0.1"], "islands.proximal", "islands=federated"),
        (["islands=federated", "islands.overlap=2"], "islands.overlap", "islands=diloco"),
        (["islands=parameter_server", "optimizer.base_width=64"], "optimizer.base_width", "optimizer.base_width=null"),
        (["islands=parameter_server", "train.precision=fp16"], "train.precision", "train.precision=bf16"),
        (["islands=streaming", "strategy=tensor"], "islands.codec", "islands.codec=bf16"),
    ],
)
def test_a_key_that_its_method_does_not_read_is_refused(overrides, key, hint):
    with pytest.raises(ConfigError) as caught:
        compose_config([*overrides, ADDRESS])
    assert key in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("method", ["diloco", "local_sgd", "streaming", "federated", "parameter_server"])
def test_presets_compose(method):
    assert compose_config([f"islands={method}", ADDRESS]).islands.is_used


@pytest.mark.parametrize("address", ["localhost", "localhost:0", "localhost:65536", ":29600"])
def test_an_address_without_a_host_or_a_port_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        compose_config(["islands=diloco", f"islands.address='{address}'"])
