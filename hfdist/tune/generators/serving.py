"""The conversation of a generator with the broker, until the training ends. No torch.

generator   ready ->             answers ->             ready ->   (the version was removed meanwhile)
broker                prompts ->            prompts ->                         prompts -> ...    ended
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hfdist.tune.generators.messages import Link, pack, unpack


class Answering(Protocol):
    """Answers prompts by versions of the policy: a model of this process, or a server."""

    def answer(self, rollback: int, version: int, prompts: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
        """Answer prompts by a version of the policy; FileNotFoundError: the version has been removed."""


def serve(generator: Answering, broker: Link) -> None:
    """Answer the prompts that the broker sends, until it says that the training has ended.

    Raises:
        OSError: the connection has ended.
    """
    broker.send(pack({"kind": "ready"}))
    while True:
        asked = unpack(broker.recv())
        if "ended" in asked:
            return
        policy = {"rollback": asked["rollback"], "version": asked["version"]}
        try:
            answers = generator.answer(**policy, prompts=asked["prompts"])
        except FileNotFoundError:
            # This generator was slow: a newer version has taken its place.
            broker.send(pack({"kind": "ready"}))
        else:
            broker.send(pack({"kind": "answers", **policy, "answers": answers}))
