"""The broker: a thread of rank 0 that passes prompts of all data ranks to generators, and their answers back.

a rank        publish  a version of the policy can be read        ->  broker
              want     prompts, of this step and of later ones    ->  broker  ->  prompts    a generator
              need     numbers of prompts, whose answers it       ->  broker  <-  ready      a generator is idle
                       waits for                                              <-  answers    and it is idle again
              answers to a prompt, or an error                    <-  broker  <-  gone       it will answer nothing
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from hfdist.errors import PeerError, printable
from hfdist.messages.message import Message, NotAMessageError, as_message
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.messages import DROPPED, RANK, pack, unpack
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import Processes
from hfdist.tune.generators.sockets import Socket

logger = logging.getLogger(__name__)

_POLL_MILLISECONDS = 50
"""The longest pause between two looks at the generators' processes."""
_HINT_SECONDS = 10.0
"""Seconds in which nobody has joined, after which the log says how a generator joins."""
_MOST_SAID = 100
"""The most characters of a stranger's name that are logged."""
_NOT_UNDERSTOOD = -1
"""Number in place of a prompt's, for a rank whose message was not understood: it gets the error as if it waited."""


class _Need(NamedTuple):
    """Who waits for the answers to a prompt."""

    rank: bytes
    """Name of the rank at the socket."""
    step: int
    """Step that trains on the answers."""


class Broker:
    """Passes prompts and answers on in a thread, until `stop`.

    Args:
        socket: socket of `open_broker`; from here on, only the thread uses it.
        processes: processes of the generators of this machine.
        files: files of the policy that generators read.
        dispatcher: says who answers which prompt; from here on, only the thread uses it.
        most_prompts: most prompts that a generator answers at once.
        check: the check that answers must pass.
        invitation: how a generator of another machine joins; None: none can.
    """

    def __init__(
        self,
        socket: Socket,
        processes: Processes,
        files: PolicyFiles,
        *,
        dispatcher: Dispatcher,
        most_prompts: int,
        check: AnswerCheck,
        invitation: str | None = None,
    ) -> None:
        self._socket, self._processes, self._files = socket, processes, files
        self._dispatcher, self._most_prompts, self._check = dispatcher, most_prompts, check
        self._rollback = 0
        """How often the run has gone back to an earlier step, as far as messages say."""
        self._idle: list[str] = []
        """Names of generators that wait for prompts, the one that waits longest first."""
        self._ended: set[str] = set()
        """Names of generators that are no more: what they have sent may come late. A new start has a new name."""
        self._needed: dict[int, _Need] = {}
        """Ranks that wait for answers, by the number of the prompt."""
        self._error: PeerError | None = None
        """Why there will be no answers; None: there may be some."""
        self._heard_seconds = time.monotonic()
        """When a generator was heard last, or the first answer was needed after that."""
        self._begin_seconds = time.monotonic()
        self._invitation = invitation
        """The invitation; None once it is of no use: a generator has joined, or the log has it."""
        self.num_tokens = 0
        """Number of tokens that generators have generated so far."""
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generators", daemon=True)
        self._thread.start()

    @property
    def num_thrown_away(self) -> int:
        """Number of prompts whose answers were not used."""
        return self._dispatcher.num_thrown_away

    def stop(self) -> None:
        """End the thread and the generators."""
        self._stops.set()
        self._thread.join()
        self._processes.end()
        self._socket.close()

    def _run(self) -> None:
        while not self._stops.is_set():
            try:
                # Wait only until the first message: others that have come are taken at once.
                pause = _POLL_MILLISECONDS
                while self._socket.poll(pause):
                    sender, *contents = self._socket.recv_multipart()
                    self._hear_or_drop(sender, b"".join(contents))
                    pause = 0
                self._go_on()
                if self._error is None:
                    self._answer_ranks()
            except PeerError as error:
                self._error = error
            except Exception as error:
                # The ranks would wait for ever for a thread that has ended.
                logger.exception("the broker of the generators has failed")
                self._error = PeerError("prompts cannot be passed to generators any more", found=repr(error))
            if self._error is not None:
                self._tell_ranks(self._error)

    def _hear_or_drop(self, sender: bytes, content: bytes) -> None:
        """Take a message; a generator that sends what is none is dropped, and a rank that does so is an error."""
        name = sender.decode(errors="replace")
        try:
            self._hear(sender, name, unpack(content))
        except NotAMessageError as error:
            if name.startswith(RANK):
                # A rank of this run would wait for ever.
                self._needed[_NOT_UNDERSTOOD] = _Need(sender, step=0)
                raise PeerError(f"the broker of the generators does not understand {name}", found=str(error)) from error
            logger.warning("%s is not heard any more: %s", printable(name, _MOST_SAID), error)
            self._drop(name)
            self._socket.send_multipart([sender, DROPPED])

    def _hear(self, sender: bytes, name: str, message: Message) -> None:
        """Take a message. NotAMessageError: it is none that this sender may send."""
        kind, rollback = message.text("kind"), message.integer("rollback", default=0)
        if kind in ("ready", "answers"):
            self._take_answers(name, message, rollback)
            self._heard_seconds, self._invitation = time.monotonic(), None
            if name not in self._ended and name not in self._idle:
                self._idle.append(name)
        elif kind == "gone":
            logger.warning("%s has gone: its prompts go to others", printable(name, _MOST_SAID))
            self._drop(name)
        elif kind in ("publish", "want", "need") and name.startswith(RANK):
            self._hear_rank(sender, kind, message, rollback)
        else:
            raise NotAMessageError("nobody says that here")

    def _hear_rank(self, sender: bytes, kind: str, message: Message, rollback: int) -> None:
        """Take a message of a rank; what it said before the run went back does not count."""
        if rollback > self._rollback:
            self._rollback, self._needed = rollback, {}
            self._dispatcher.forget()
        if rollback < self._rollback:
            return
        if kind == "publish":
            self._dispatcher.publish(message.integer("version"))
            self._files.remove_others(self._rollback, self._dispatcher.versions_in_use())
        elif kind == "want":
            for prompt in map(as_message, message.list("prompts")):
                self._dispatcher.add(prompt.integer("number"), prompt.integer("step"), prompt)
        else:
            numbers = [Message(number=given).integer("number") for given in message.list("numbers")]
            need, first = _Need(sender, message.integer("step")), message.integer("first")
            if not self._needed:
                # The time in which nothing was needed does not count.
                self._heard_seconds = time.monotonic()
            self._needed |= dict.fromkeys(numbers, need)
            # All ranks have left the step before by now.
            self._dispatcher.drop_before(first)

    def _take_answers(self, generator: str, message: Message, rollback: int) -> None:
        """Take the answers of a generator, after all of them are checked; a generator that is ready has none."""
        given = [as_message(one) for one in message.list("answers")] if "answers" in message else []
        numbers = [answers.integer("number") for answers in given]
        num_tokens = sum(map(self._check.count_tokens, given))
        version = message.integer("version") if given else 0
        if given and rollback == self._rollback and version > (self._dispatcher.version or 0):
            raise NotAMessageError("there is no such version of the policy yet")
        self.num_tokens += num_tokens
        if given:
            self._processes.note_answers(generator)
        for number, answers in zip(numbers, given, strict=True):
            if rollback == self._rollback:
                self._dispatcher.answer(generator, number, version, answers)
        # Prompts without an answer: the generator could not read its policy, or was started anew.
        self._dispatcher.lose(generator)

    def _drop(self, name: str) -> None:
        """Hear a generator no more, and give its prompts to others."""
        self._ended.add(name)
        self._dispatcher.lose(name)
        self._idle = [one for one in self._idle if one != name]

    def _go_on(self) -> None:
        """Look after the generators, and give prompts to idle ones. PeerError: none is left, or none answers."""
        for name in self._processes.restart_dead():
            logger.warning("%s has ended: its prompts go to others", name)
            self._drop(name)
        now = time.monotonic()
        if self._needed:
            self._check_patience(now)
        self._hand_out(now)

    def _check_patience(self, now: float) -> None:
        """Say how a generator joins if none has; PeerError: none has answered for too long."""
        if self._invitation is not None and now - self._begin_seconds > _HINT_SECONDS:
            logger.warning("no generator has joined yet, and the run waits for one: %s", self._invitation)
            self._invitation = None
        answer_seconds, silent_seconds = self._dispatcher.answer_seconds, now - self._heard_seconds
        # A prompt goes to another generator after `answer_seconds`, and that one has as long.
        if silent_seconds > 2 * answer_seconds:
            what = f"no generator has answered for {silent_seconds:.0f} s"
            hint = f"a longer time, as task.answer_seconds={2 * answer_seconds:g}"
            raise PeerError(what, where="task.answer_seconds", found=f"{answer_seconds:g}", hint=hint)

    def _hand_out(self, now: float) -> None:
        for generator in list(self._idle):
            given = self._dispatcher.hand_out(generator, self._most_prompts, now)
            if not given:
                break
            self._idle.remove(generator)
            version, prompts = self._dispatcher.version, [prompt for _, prompt in given]
            self._send(generator.encode(), {"rollback": self._rollback, "version": version, "prompts": prompts})

    def _tell_ranks(self, error: PeerError) -> None:
        said = {"what": error.what, "where": error.where, "found": error.found, "hint": error.hint}
        for rank in {need.rank for need in self._needed.values()}:
            self._send(rank, {"error": said})
        self._needed = {}

    def _answer_ranks(self) -> None:
        for number, need in list(self._needed.items()):
            answers = self._dispatcher.take(number, need.step)
            if answers is not None:
                del self._needed[number]
                self._send(need.rank, {"rollback": self._rollback, "version": answers.version} | answers.content)

    def _send(self, receiver: bytes, message: Mapping[str, object]) -> None:
        self._socket.send_multipart([receiver, pack(message)])
