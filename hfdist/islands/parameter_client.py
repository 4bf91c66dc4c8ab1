"""An island of a parameter server: its optimizer keeps gradients in place of a step; it pushes them, and takes weights.

What the server's optimizer keeps is fetched for checkpoints, under the names that it has in any other run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import torch

from hfdist.checkpoint.piece import MASTER, STEP, TRAINED, WEIGHT, Piece
from hfdist.collectives import gather_json, rank
from hfdist.config.islands import IslandsConfig
from hfdist.config.optimizer import OptimizerConfig
from hfdist.errors import PeerError
from hfdist.islands.codec import encode
from hfdist.islands.cuts import cut, cut_values, share_out_parts
from hfdist.islands.member import make_member
from hfdist.islands.owned_pieces import OwnedPieces
from hfdist.islands.parameter_store import find_slots
from hfdist.islands.segment import Segment
from hfdist.islands.shard_members import ShardMembers
from hfdist.islands.vectors import join_vectors, to_cpu_vector
from hfdist.messages.message import Message

_GRADIENT = "gradient"
_MOST_CONNECTIONS = 3
"""The most connections that end one after another before anything has come."""


class Place(TypedDict):
    """Where an island is."""

    step: int
    state: dict[str, object]
    """What others need besides tensors to go on from there."""


class GradientRecorder(torch.optim.SGD):
    """SGD that keeps the gradients of its last step. The weights that it makes are replaced by the server's."""

    has_taken: bool = False
    """Whether it has gradients; not once they are pushed, nor where they were not finite."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Keep the gradients, and step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if _GRADIENT not in state:
                    state[_GRADIENT] = torch.zeros_like(parameter)
                if parameter.grad is None:
                    # Not that of an earlier step once more.
                    state[_GRADIENT].zero_()
                else:
                    state[_GRADIENT].copy_(parameter.grad)
                    self.has_taken = True
        super().step(closure)


class ParameterClient:
    """An island's part. All its ranks make it and call its methods together.

    Args:
        config: `islands.*`.
        optimizer: of the server.
        list_pieces: gives the pieces of this rank's engine, anew each time.
    """

    def __init__(
        self, config: IslandsConfig, optimizer: OptimizerConfig, list_pieces: Callable[[], Iterable[Piece]]
    ) -> None:
        self._config, self._owned = config, OwnedPieces(list_pieces)
        self._slots = find_slots(optimizer)
        self._updates = torch.zeros(())
        own = self._owned.own()
        self._kept = {key: [torch.zeros(piece.view.numel()) for piece in own] for key in self._slots.tensors}
        """What the server's optimizer keeps of each own piece, by slot, as the last answer or a checkpoint has it."""
        self._kept_parts = [cut_values(own, values) for values in self._kept.values()]
        """Views of `_kept`, by slot."""
        self._indices = share_out_parts(cut(own), config.server_shards)
        """Indices, among the parts of own pieces, of those that each shard of the server has."""
        self._members: ShardMembers | None = None
        """The connections to the server; None before and after a training."""
        self._figures: dict[str, float] = {}

    @property
    def layout(self) -> str:
        """Equal for ranks that hold the same pieces."""
        return self._owned.layout

    def pieces(self, of_engine: Iterable[Piece]) -> Iterator[Piece]:
        """List what a checkpoint holds: the engine's weights, and the optimizer's state in place of gradients."""
        numbers = (STEP,) if self._slots.counts else (TRAINED,)
        for piece in of_engine:
            if piece.key in (WEIGHT, MASTER, *numbers):
                yield piece
            elif piece.key == TRAINED:
                yield replace(piece, key=STEP, view=self._updates)
        for key, values in self._kept.items():
            for piece, value in zip(self._owned.own(), values, strict=True):
                yield replace(piece, key=key, view=value, set_number=None)

    def connect(self, job: Mapping[str, object], step: int, state: object) -> Place:
        """Connect to the server, and take its weights.

        Args:
            job: what must be the same on all islands, by key.
            step: at which this island is.
            state: what others need besides tensors to go on from there, as JSON.

        Returns:
            That of the island that is ahead of all.

        Raises:
            PeerError: the server does not answer.
            ConfigError: the server refuses this island.
        """
        self._members = ShardMembers(make_member(self._config, job, gather_json(f"rank {rank()}")))
        return self._join(step, state, may_begin=True)

    def exchange(self, step: int, recorder: GradientRecorder, targets: float, state: object) -> Place | None:
        """Push the gradients of a step, and take weights.

        Args:
            step: the step that has just ended.
            recorder: has them.
            targets: of the step, over this island.
            state: as of `connect`.

        Returns:
            None; or, if the connection had ended, what `connect` gives.
        """
        begin = time.monotonic()
        # Part by part, so that it does not matter which parts a shard has.
        coded = [encode(self._config.codec, to_cpu_vector(part.view)) for part in cut(self._owned.own_state(_GRADIENT))]
        contents = [b"".join(coded[index] for index in of_shard) for of_shard in self._indices]
        # A step that was skipped counts nothing; one rank's parameters may have no part in a step.
        has_taken = any(gather_json(recorder.has_taken))
        message = {"push": step, "targets": targets if has_taken else 0.0, "state": state if rank() == 0 else None}
        recorder.has_taken = False
        other_island = None
        answers = self._ask(message, [{"push": step}] * (len(contents) - 1), contents)
        if answers is not None:
            self._take(answers, with_slots=False)
        else:
            other_island = self._join(step, state, may_begin=False)
        self._figures["islands/sent_bytes"] = self._figures.get("islands/sent_bytes", 0) + sum(map(len, contents))
        waited = self._figures.get("islands/wait_seconds", 0.0) + time.monotonic() - begin
        self._figures |= {"islands/wait_seconds": waited, "islands/updates": float(self._updates)}
        return other_island

    def fetch(self) -> None:
        """Take weights, and what the server's optimizer keeps of them, for a checkpoint.

        Raises:
            PeerError: the connection has ended.
        """
        answers = self._ask({"pull": 1})
        if answers is None:
            assert self._members is not None
            self._members.hear_why()
            what, hint = "the server has ended the connection before a save", "the same command goes on from the last"
            raise PeerError(what, where="islands.address", found=self._config.address, hint=hint)
        self._take(answers, with_slots=True)

    def figures(self) -> dict[str, float]:
        """Give what a training line says of exchanges since the last line, of this rank."""
        figures, self._figures = self._figures, {}
        return figures

    def leave(self) -> None:
        """Take part no more."""
        assert self._members is not None
        self._members.leave()
        self._members = None

    def _join(self, step: int, state: object, *, may_begin: bool) -> Place:
        """Bring what this island has, to begin with it or to be given what the others have.

        `may_begin` is False after a step: what the optimizer keeps is then older than the weights.
        """
        assert self._members is not None
        for _ in range(_MOST_CONNECTIONS):
            self._members.connect()
            parts = cut(self._owned.own())
            rows = [[to_cpu_vector(part.view) for part in parts], *self._kept_parts]
            contents = [
                join_vectors(row[index] for row in rows for index in of_shard).numpy().tobytes()
                for of_shard in self._indices
            ]
            first, *others = [
                {"segments": [Segment.of(parts[index]) for index in of_shard]} for of_shard in self._indices
            ]
            message = {"step": step, "updates": int(self._updates), "may_begin": may_begin}
            answers = self._ask(first | message | {"state": state if rank() == 0 else None}, others, contents)
            if answers is not None:
                self._take(answers, with_slots=True)
                furthest: Place = gather_json({"step": answers[0]["step"], "state": answers[0]["state"]})[0]
                return furthest
        what = "the server of the islands has ended each connection, or was started anew and has no weights"
        hint = "its own lines say why; the same command goes on from the last checkpoint"
        raise PeerError(what, where="islands.address", found=self._config.address, hint=hint)

    def _ask(
        self,
        first: Mapping[str, object],
        others: Sequence[Mapping[str, object]] = (),
        contents: Sequence[bytes] = (b"",),
    ) -> list[Message] | None:
        """Send on all ranks, and wait for weights; None: the connection of some rank has ended."""
        assert self._members is not None
        return self._members.ask([first, *others], contents)

    def _take(self, answers: Sequence[Message], *, with_slots: bool) -> None:
        """Take weights, and what the server's optimizer keeps of them if that was asked for, from all shards."""
        own = self._owned.own()
        weights = [torch.empty(piece.view.numel()) for piece in own]
        rows = [cut_values(own, weights), *(self._kept_parts if with_slots else [])]
        for answer, of_shard in zip(answers, self._indices, strict=True):
            if not of_shard:
                continue
            values = torch.frombuffer(bytearray(answer["payload"]), dtype=torch.float32).view(len(rows), -1)
            sizes = [rows[0][index].numel() for index in of_shard]
            for row, of_row in zip(rows, values, strict=True):
                for index, value in zip(of_shard, of_row.split(sizes), strict=True):
                    row[index].copy_(value)
        self._updates.fill_(int(answers[0]["weights"]))
        self._owned.spread(weights)
