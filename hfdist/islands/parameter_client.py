"""An island of a parameter server: it sends the gradients of each step to the server, and takes the server's weights.

For a checkpoint it fetches the state of the server's optimizer, too, and saves it under the names of any other run.
Each rank speaks for the tensors that it owns. They are cut into parts, and each shard of the server has some of these:

    owned pieces    piece 0          piece 1        one exchange with shard 0, `_shards[0] == [0, 2]`:
    parts           0      1      2                   to it      gradients of part 0 | part 2
    shards          |-0-|  |-1-|  |-0-|               from it    weights of part 0 | part 2
                                                                 each tensor of the optimizer, part 0 | part 2
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
"""Key of a parameter's gradient in the state of a `GradientRecorder`."""
_MOST_CONNECTIONS = 3
"""The most connections in a row that may end before weights have come."""


class Place(TypedDict):
    """How far the island that is ahead of all others has trained."""

    step: int
    state: dict[str, object]
    """The state that another island needs besides tensors to go on from that step."""


class GradientRecorder(torch.optim.SGD):
    """SGD that keeps the gradients of its last step. The weights that it makes are replaced by the server's."""

    has_taken: bool = False
    """Whether there are gradients of a step that are not pushed yet; a step that was skipped leaves none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Keep the gradients, and step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if _GRADIENT not in state:
                    state[_GRADIENT] = torch.zeros_like(parameter)
                if parameter.grad is None:
                    # The gradient of an earlier step must not be pushed again.
                    state[_GRADIENT].zero_()
                else:
                    state[_GRADIENT].copy_(parameter.grad)
                    self.has_taken = True
        super().step(closure)


class ParameterClient:
    """One rank's exchange with a parameter server. All ranks of an island make it and call its methods together.

    Args:
        config: `islands.*`.
        optimizer: settings of the server's optimizer.
        list_pieces: lists the pieces of this rank's engine, anew at each call.
    """

    def __init__(
        self, config: IslandsConfig, optimizer: OptimizerConfig, list_pieces: Callable[[], Iterable[Piece]]
    ) -> None:
        self._config, self._owned = config, OwnedPieces(list_pieces)
        self._slots = find_slots(optimizer)
        self._updates = torch.zeros(())
        """Number of steps of the server's optimizer that have made the weights."""
        own = self._owned.own()
        self._states = {key: [torch.zeros(piece.view.numel()) for piece in own] for key in self._slots.tensors}
        """State of the server's optimizer, by key and owned piece, as the last answer or a checkpoint has it."""
        self._state_parts = [cut_values(own, values) for values in self._states.values()]
        """Views of `_states`, by key and part."""
        self._shards = share_out_parts(cut(own), config.server_shards)
        """Indices of the parts that each shard of the server has."""
        self._members: ShardMembers | None = None
        """The connections to the server; None before and after a training."""
        self._figures: dict[str, float] = {}

    @property
    def layout(self) -> str:
        """A digest that is equal for ranks that hold the same pieces."""
        return self._owned.layout

    def pieces(self, of_engine: Iterable[Piece]) -> Iterator[Piece]:
        """List the pieces of a checkpoint: the engine's weights, and the optimizer's state in place of gradients."""
        number = STEP if self._slots.counts else TRAINED
        for piece in of_engine:
            if piece.key in (WEIGHT, MASTER, number):
                yield piece
            elif piece.key == TRAINED:
                # SGD counts no steps, and the server's optimizer does.
                yield replace(piece, key=STEP, view=self._updates)
        for key, values in self._states.items():
            for piece, value in zip(self._owned.own(), values, strict=True):
                yield replace(piece, key=key, view=value, set_number=None)

    def connect(self, job: Mapping[str, object], step: int, state: object) -> Place:
        """Connect to the server, and take its weights.

        Args:
            job: values that must be the same on all islands, by key.
            step: the step that this island has trained to.
            state: the state that another island needs besides tensors to go on from that step, as JSON.

        Returns:
            The step and state of the island that is ahead of all others.

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
            recorder: the optimizer that has kept the gradients of this step.
            targets: number of targets in the step, over all ranks of this island.
            state: the state that another island needs besides tensors to go on from this step, as JSON.

        Returns:
            None; or, if the connection had ended, the step and state of the island that is ahead of all others.

        Raises:
            PeerError: the server does not answer, or has no weights any more.
            ConfigError: the server refuses this island when it connects anew.
        """
        begin = time.monotonic()
        # Part by part, so that it does not matter which parts a shard has.
        coded = [encode(self._config.codec, to_cpu_vector(part.view)) for part in cut(self._owned.own_state(_GRADIENT))]
        contents = [b"".join(coded[index] for index in indices) for indices in self._shards]
        # A step that was skipped counts nothing. One rank's parameters may have no part in a step.
        has_taken = any(gather_json(recorder.has_taken))
        recorder.has_taken = False
        first = {"push": step, "targets": targets if has_taken else 0.0, "state": state if rank() == 0 else None}
        answers = self._ask([first, *({"push": step} for _ in contents[1:])], contents)
        furthest: Place | None = None
        if answers is not None:
            self._take(answers, with_slots=False)
        else:
            furthest = self._join(step, state, may_begin=False)
        self._add_figures(sent_bytes=sum(map(len, contents)), wait_seconds=time.monotonic() - begin)
        return furthest

    def _add_figures(self, *, sent_bytes: int, wait_seconds: float) -> None:
        """Add an exchange that has ended to the figures of the next training line."""
        figures = self._figures
        figures["islands/sent_bytes"] = figures.get("islands/sent_bytes", 0) + sent_bytes
        figures["islands/wait_seconds"] = figures.get("islands/wait_seconds", 0.0) + wait_seconds
        figures["islands/updates"] = float(self._updates)

    def fetch(self) -> None:
        """Take the server's weights and the state of its optimizer, for a checkpoint.

        Raises:
            PeerError: the connection has ended.
        """
        answers = self._ask([{"pull": 1}], [b""])
        if answers is None:
            assert self._members is not None
            self._members.hear_why()
            what, hint = "the server has ended the connection before a save", "the same command goes on from the last"
            raise PeerError(what, where="islands.address", found=self._config.address, hint=hint)
        self._take(answers, with_slots=True)

    def figures(self) -> dict[str, float]:
        """Give what a training line says of this rank's exchanges since the last line, by metric, and count anew."""
        figures, self._figures = self._figures, {}
        return figures

    def leave(self) -> None:
        """Tell the server that this island has ended, and close the connections."""
        assert self._members is not None
        self._members.leave()
        self._members = None

    def _join(self, step: int, state: object, *, may_begin: bool) -> Place:
        """Send the tensors of this island, which the server begins with, or answers with those that it has.

        `may_begin` is False after a step: the state of the optimizer here is then older than the weights.
        """
        assert self._members is not None
        progress = {
            "step": step,
            "updates": int(self._updates),
            "may_begin": may_begin,
            "state": state if rank() == 0 else None,
        }
        for _ in range(_MOST_CONNECTIONS):
            self._members.connect()
            messages, contents = self._describe_parts()
            answers = self._ask([messages[0] | progress, *messages[1:]], contents)
            if answers is not None:
                self._take(answers, with_slots=True)
                own_answer = answers[0]
                furthest: Place = gather_json({"step": own_answer["step"], "state": own_answer["state"]})[0]
                return furthest
        what = "the server of the islands has ended each connection, or was started anew and has no weights"
        hint = "its own lines say why; the same command goes on from the last checkpoint"
        raise PeerError(what, where="islands.address", found=self._config.address, hint=hint)

    def _describe_parts(self) -> tuple[list[dict[str, object]], list[bytes]]:
        """Give for each shard the segments of its parts, and their values: weights, then the optimizer's tensors."""
        parts = cut(self._owned.own())
        rows = [[to_cpu_vector(part.view) for part in parts], *self._state_parts]
        messages: list[dict[str, object]] = []
        contents = []
        for indices in self._shards:
            messages.append({"segments": [Segment.of(parts[index]) for index in indices]})
            values = join_vectors(row[index] for row in rows for index in indices)
            contents.append(values.numpy().tobytes())
        return messages, contents

    def _ask(self, messages: Sequence[Mapping[str, object]], contents: Sequence[bytes]) -> list[Message] | None:
        """Send on all ranks, and wait for weights; None: the connection of some rank has ended."""
        assert self._members is not None
        return self._members.ask(messages, contents)

    def _take(self, answers: Sequence[Message], *, with_slots: bool) -> None:
        """Take weights from the answers of all shards; `with_slots`: and the state of the server's optimizer."""
        own = self._owned.own()
        weights = [torch.empty(piece.view.numel()) for piece in own]
        rows = [cut_values(own, weights)]
        if with_slots:
            rows += self._state_parts
        for answer, indices in zip(answers, self._shards, strict=True):
            if not indices:
                # torch makes no tensor of no bytes.
                continue
            values = torch.frombuffer(bytearray(answer["payload"]), dtype=torch.float32).view(len(rows), -1)
            sizes = [rows[0][index].numel() for index in indices]
            for row, row_values in zip(rows, values, strict=True):
                for index, value in zip(indices, row_values.split(sizes), strict=True):
                    row[index].copy_(value)
        # An answer with weights says under this key how many updates have made them.
        self._updates.fill_(int(answers[0]["weights"]))
        self._owned.spread(weights)
