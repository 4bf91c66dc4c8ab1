"""`islands.*`: separate launches that train one model together, and speak once in many steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hfdist.config.ranges import limited


class IslandMethod(Enum):
    """What islands make of what each has learned."""

    none = "none"
    """There are no others."""
    diloco = "diloco"
    """The mean of their changes is the gradient of an outer optimizer: SGD with Nesterov momentum. With the rate 1 and
    without momentum the weights are averaged (local SGD)."""
    federated = "federated"
    """Each island is a client with data of its own, which never leave it. Changes are weighted by the tokens that made
    them (FedAvg)."""
    parameter_server = "parameter_server"
    """Islands push the gradients of each step to a server, which steps the optimizer."""


class OuterRule(Enum):
    """How the mean change of all islands moves the weights."""

    nesterov = "nesterov"
    adam = "adam"
    """FedAdam (Reddi et al. 2021): `outer_momentum` is its beta1."""


class Codec(Enum):
    """How numbers travel between islands."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    fp4 = "fp4"


@dataclass(kw_only=True)
class IslandsConfig:
    """An island is a launch of its own, in any layout; all islands have the same."""

    method: IslandMethod = IslandMethod.none
    count: int = limited(1, at_least=1)
    """Islands with which the training begins. Each reads one of so many shares of the data; clients have their own."""
    index: int = limited(0, at_least=0)
    """Which of them this launch is."""
    address: str | None = None
    """HOST:PORT of `hfdist serve`."""
    every: int = limited(100, at_least=1)
    """Steps of a round; a parameter server has none."""
    outer_optimizer: OuterRule = OuterRule.nesterov
    outer_lr: float = limited(0.7, above=0)
    outer_momentum: float = limited(0.9, at_least=0, at_most=0.999)
    outer_beta2: float = limited(0.99, at_least=0, at_most=0.9999)
    """This and `outer_eps` are Adam's."""
    outer_eps: float = limited(1e-3, above=0)
    fragments: int = limited(1, at_least=1)
    """Parts of the model that are exchanged one after another, each once in a round."""
    overlap: int = limited(0, at_least=0)
    """Steps that are trained while an exchange is under way."""
    mix: float = limited(0.0, at_least=0, at_most=0.999)
    """Share of an island's own weights that stays after an exchange; the rest comes from the outer weights."""
    participation: float = limited(1.0, above=0, at_most=1)
    """Share of the clients that train in a round, drawn anew for each; the others wait."""
    proximal: float = limited(0.0, at_least=0)
    """How strongly the weights are held to those at the round's begin (FedProx), as decoupled decay towards them."""
    staleness: int | None = limited(0, at_least=0)
    """Steps by which an island of a parameter server may be ahead of the slowest one. 0: all push, then there is one
    step with the mean of all. None: no island waits for another."""
    codec: Codec = Codec.fp32
    timeout_seconds: float = limited(60.0, above=0)
    """How long an island looks for a server that does not answer, or waits for a part of which nothing comes."""

    @property
    def shares(self) -> int:
        """Number of shares of the data; each island reads one."""
        return 1 if self.method is IslandMethod.federated else self.count

    @property
    def exchange_every(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    @property
    def is_used(self) -> bool:
        """Whether there are islands."""
        return self.method is not IslandMethod.none
