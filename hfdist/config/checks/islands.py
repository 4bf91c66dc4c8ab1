"""Checks `islands.*`."""

from __future__ import annotations

import dataclasses
import json
import re

from hfdist.config.checks.conflict import conflict
from hfdist.config.islands import Codec, IslandMethod, IslandsConfig
from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig
from hfdist.config.train import Precision
from hfdist.topology import PARTS

_KEYS_OF_ROUNDS = ("port", "every", "outer_optimizer", "outer_lr", "outer_momentum", "outer_beta2", "outer_eps")
_KEYS_OF_METHODS = {
    IslandMethod.diloco: (*_KEYS_OF_ROUNDS, "fragments", "overlap", "mix"),
    IslandMethod.federated: (*_KEYS_OF_ROUNDS, "participation", "proximal"),
    IslandMethod.parameter_server: ("staleness", "server_shards"),
}
"""Keys of `islands` that only some methods read, by method."""


def check_islands(config: RunConfig) -> None:
    """Raise a ConfigError on keys that the method, or none, has no use for, and on what does not go with it."""
    if not config.islands.is_used:
        _check_unused(config)
        return
    _check_address(config)
    _check_keys_of_method(config)
    _check_arithmetic(config)
    _check_exchanges(config)


def _check_unused(config: RunConfig) -> None:
    islands, default = config.islands, IslandsConfig()
    for name in (field.name for field in dataclasses.fields(islands)):
        if getattr(islands, name) != getattr(default, name):
            what = "this key belongs to islands, and there are none"
            value = json.dumps(plain(getattr(default, name))).strip('"')
            hint = f"islands.method=diloco, or islands.{name}={value}"
            raise conflict(config, f"islands.{name} islands.method", what, hint=hint)


def _check_address(config: RunConfig) -> None:
    address = config.islands.address
    found = None if address is None else re.fullmatch(r".+:(\d{1,5})", address)
    if found is None or not 1 <= int(found[1]) <= 65535:
        what = "the server of the islands has no address"
        hint = "hfdist serve port=29600, and islands.address=HOST:29600"
        raise conflict(config, "islands.address islands.method", what, allowed="HOST:PORT", hint=hint)


def _check_keys_of_method(config: RunConfig) -> None:
    islands, default = config.islands, IslandsConfig()
    for method, names in _KEYS_OF_METHODS.items():
        for name in names:
            is_read = name in _KEYS_OF_METHODS[islands.method]
            if not is_read and getattr(islands, name) != getattr(default, name):
                what = f"this key does not belong to islands.method={islands.method.value}"
                raise conflict(config, f"islands.{name} islands.method", what, hint=f"islands={method.value}")


def _check_arithmetic(config: RunConfig) -> None:
    islands = config.islands
    if islands.method is IslandMethod.parameter_server and config.train.precision is Precision.fp16:
        what = "a loss scaler looks at the gradients of one island alone"
        keys, hint = "train.precision islands.method", "train.precision=bf16"
        raise conflict(config, keys, what, allowed="fp32, bf16", hint=hint)
    for axis in ("pipeline", *PARTS):
        if islands.codec in (Codec.int8, Codec.fp4) and getattr(config.strategy, axis) > 1:
            # Numbers that stand together share a scale, and each of these ranks has others beside what all have.
            what = "ranks with other parts of the model would round differently what all of them have"
            keys, hint = f"islands.codec strategy.{axis}", "islands.codec=bf16"
            raise conflict(config, keys, what, allowed="fp32, bf16", hint=hint)


def _check_exchanges(config: RunConfig) -> None:
    islands = config.islands
    if islands.every % islands.fragments != 0:
        what = "the parts of the model cannot be exchanged at equal distances"
        allowed = f"a divisor of {islands.every}"
        raise conflict(config, "islands.fragments islands.every", what, allowed=allowed)
    if islands.overlap >= islands.exchange_every:
        what, allowed = "the next exchange would begin before the last has ended", f"0 to {islands.exchange_every - 1}"
        raise conflict(config, "islands.overlap islands.every islands.fragments", what, allowed=allowed)
    if islands.index >= islands.count:
        what, allowed = "there are fewer islands", f"0 to {islands.count - 1}"
        raise conflict(config, "islands.index islands.count", what, allowed=allowed)
