"""`islands.*`: separate launches that train one model together, and speak once in many steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hfdist.config.ranges import DAY_SECONDS, limited


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


SCALED_NUMBERS = 256
"""Numbers of int8 and fp4 that share a float32 scale."""

CUT_ELEMENTS = 2**22
"""The most elements of a tensor that a shard of a parameter server has as one: 16 MiB. A larger tensor is cut."""


class Codec(Enum):
    """How numbers travel between islands."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    fp4 = "fp4"

    def num_bytes(self, num_elements: int) -> int:
        """Give the bytes that so many numbers take."""
        scales = 4 * -(-num_elements // SCALED_NUMBERS)
        match self:
            case Codec.fp32:
                return 4 * num_elements
            case Codec.bf16:
                return 2 * num_elements
            case Codec.int8:
                return num_elements + scales
            case Codec.fp4:
                return -(-num_elements // 2) + scales


@dataclass(kw_only=True)
class IslandsConfig:
    """An island is a launch of its own, in any layout; all islands have the same."""

    method: IslandMethod = IslandMethod.none
    """How launches train one model together: none | diloco | federated | parameter_server."""
    count: int = limited(1, at_least=1)
    """Islands with which the training begins, and which share the data.

    Each reads one of so many shares of the data; clients have their own.
    """
    index: int = limited(0, at_least=0)
    """Which of the islands this launch is."""
    address: str | None = None
    """HOST:PORT of `hfdist serve`."""
    port: int | None = limited(None, at_least=1, at_most=65535)
    """First port at which ranks hear those of other islands, for a firewall; null: any free ones.

    Local rank n takes this port + n, so that islands on one machine need ports apart.
    """
    every: int = limited(100, at_least=1)
    """Steps of a round, at whose end islands exchange what they have learned.

    A parameter server has none.
    """
    outer_optimizer: OuterRule = OuterRule.nesterov
    """Optimizer of the outer step: nesterov | adam."""
    outer_lr: float = limited(0.7, above=0)
    """Rate of the outer step along the mean of what all have learned."""
    outer_momentum: float = limited(0.9, at_least=0, at_most=0.999)
    """Momentum of the outer step; adam: beta1."""
    outer_beta2: float = limited(0.99, at_least=0, at_most=0.9999)
    """adam: decay of the mean of squares."""
    outer_eps: float = limited(1e-3, above=0)
    """adam: what is added to the root of the mean of squares."""
    fragments: int = limited(1, at_least=1)
    """Parts of the model that are exchanged in turn, each once in a round."""
    overlap: int = limited(0, at_least=0)
    """Steps that are trained while an exchange is under way."""
    mix: float = limited(0.0, at_least=0, at_most=0.999)
    """Share of an island's own weights that stays after an exchange.

    The rest comes from the outer weights.
    """
    participation: float = limited(1.0, above=0, at_most=1)
    """federated: share of the clients that train in a round.

    They are drawn anew for each; the others wait.
    """
    proximal: float = limited(0.0, at_least=0)
    """federated: how strongly weights are held to those at the round's begin (FedProx).

    It is decoupled decay towards them.
    """
    staleness: int | None = limited(0, at_least=0)
    """parameter_server: steps by which an island may be ahead of the slowest; null: any.

    0: all push, then there is one step with the mean of all.
    """
    server_shards: int = limited(1, at_least=1)
    """parameter_server: processes that share out the tensors, cut into parts; each steps its own.

    The first is `hfdist serve`, each other one `hfdist serve of=HOST:PORT`.
    """
    codec: Codec = Codec.fp32
    """How changes travel: fp32 | bf16 | int8 | fp4, always added up in float32."""
    timeout_seconds: float = limited(60.0, above=0, at_most=DAY_SECONDS)
    """How long a silent server is looked for, and a part that does not come is waited for."""

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
