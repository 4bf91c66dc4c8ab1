"""The threads of the watch: one beats, one judges and ends the process when the run cannot go on.

watch-beats      _beat            sends this rank's heartbeat, takes rank 0's and its verdict; may wait for the store
watch-judge      _judge           looks at what is known, never waits for the store; with a verdict: stacks, exit
watch-requests   _find_requests   on rank 0: finds requests of `explain-hang` on a disk that may hang
watch-answer     _answer          for each request: writes this rank's stacks
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hfdist.watch import requests, snapshot, stacks
from hfdist.watch.diagnosis import Diagnosis, find_left, find_lost, find_stalled
from hfdist.watch.heartbeat import Heartbeat, PeerState, Progress, beat_seconds
from hfdist.watch.store import Store
from hfdist.watch.tree import Digest

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0
"""Seconds to write stacks and the report to a disk that may hang, and to wait for those of other ranks."""
_HURRIED_BEAT_SECONDS = 0.05
_EACH_SECONDS = 3.0
"""The longest wait for what there is to say of each rank, once rank 0 asks for it."""
_REQUEST_SECONDS = 1.0
"""Seconds between two looks for a request."""


class Watcher:
    """The watch of one rank over the others. Rank 0 judges all ranks; the others follow it, and judge only rank 0.

    All ranks answer requests of `explain-hang` with their stacks, and go on.

    Args:
        progress: the marks of this rank's progress.
        store: this rank's place in the tree of ranks; `leave` closes it.
        folder: folder of this start of the run, for stacks and the report.
        heartbeat_seconds: seconds that a rank may be silent, or all ranks without progress.
        record: takes the verdict, on the rank that reports it.
    """

    def __init__(
        self,
        progress: Progress,
        store: Store,
        folder: Path,
        heartbeat_seconds: float,
        record: Callable[[Diagnosis], None] = lambda verdict: None,
    ) -> None:
        self._progress, self._store, self._folder, self._record = progress, store, folder, record
        self._heartbeat_seconds = heartbeat_seconds
        self._beat_seconds = beat_seconds(heartbeat_seconds)
        self._first = store.below.of_rank_0
        """The newest heartbeat of rank 0."""
        self._asks_each = False
        """Whether rank 0 wants to hear of each rank, and not of all together."""
        self._asks_until = 0.0
        """On rank 0: time of the clock until which `_asks_each` is set, for the answer to a request."""
        self._peers: dict[int, PeerState] = {}
        """What was known when this rank judged last, by rank: on rank 0 of all, elsewhere of rank 0 and itself."""
        self._asked: str | None = None
        """On rank 0: the newest request, the name of a folder of answers."""
        self._verdict: Diagnosis | None = None
        self._broken_since: float | None = None
        """Time at which a connection broke, by this process's clock."""
        self._left: int | None = None
        """Exit code with which this rank ends by itself."""
        self._has_written = False
        """Whether others need not wait for this rank: its stacks are on the disk; on rank 0, those of all ranks are."""
        self._silent: set[int] = set()
        """Ranks that were silent at the verdict."""
        self._wake = threading.Event()
        """Set to beat at once."""
        self._sent = threading.Event()
        """Set once the last beat is sent, or none can be."""
        self._over = threading.Event()
        """Set by `leave`: nothing is judged any more."""
        self._closed = threading.Event()
        """Set once the others have left: beats end."""
        self._beats = threading.Thread(target=self._beat, name="watch-beats", daemon=True)
        self._judges = threading.Thread(target=self._judge, name="watch-judge", daemon=True)
        # In a thread of its own, as the disk may hang.
        self._requests = threading.Thread(target=self._find_requests, name="watch-requests", daemon=True)
        self._beats.start()
        self._judges.start()
        if store.rank == 0:
            self._requests.start()

    def broke(self) -> None:
        """Note that a connection to another rank broke, so that a silent rank is found sooner."""
        self._broken_since = time.monotonic()
        self._wake.set()

    def leave(self, exit_code: int) -> None:
        """Tell the others that this rank ends by itself, and stop watching.

        Args:
            exit_code: the exit code with which its process will end.
        """
        self._left = exit_code
        self._over.set()
        self._wake.set()
        self._sent.wait(_LAST_WORDS_SECONDS)
        if len(self._store.below):
            # The store ends with this process: the ranks below must have heard that, or be leaving as well. A message
            # of the farthest rank takes a beat for each step of its way.
            seconds = (self._store.below.depth + 0.5) * self._beat_seconds
            self._wait(seconds, lambda: self._digest(time.monotonic()).num_ranks == 0)
        self._closed.set()
        # No thread of the watch outlives it, however long rank 0 has not answered.
        self._store.close()
        self._beats.join()
        self._judges.join(_LAST_WORDS_SECONDS)  # unless it is ending the process
        if self._requests.is_alive():
            self._requests.join(_LAST_WORDS_SECONDS)

    # ---- the thread that beats: until `leave` it may wait for a store that does not answer ----

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            own = self._own_beat(number)
            try:
                self._first, verdict = self._store.exchange(
                    own, self._verdict, self._beat_seconds, asks_each=self._asks_each
                )
            except Exception:
                # The others will find this rank silent, and this rank finds rank 0 silent. Nothing more can be sent.
                self._sent.set()
                return
            if not self._over.is_set():
                self._verdict = self._verdict or verdict
            if own.left is not None:
                self._sent.set()
            # A rank with ranks below it beats on until `leave` closes the watch, so that they can leave.
            is_last_beat = own.left is not None and len(self._store.below) == 0
            if self._closed.is_set() or is_last_beat:
                return
            is_hurried = self._verdict is not None or own.left is not None
            self._wake.wait(_HURRIED_BEAT_SECONDS if is_hurried else self._beat_seconds)
            self._wake.clear()

    def _own_beat(self, number: int) -> Heartbeat:
        progress, exempt, waits_in = self._progress, self._progress.exempt, None
        if exempt is None and progress.idle_seconds > self._beat_seconds:
            # Looked up only when there is something to explain.
            exempt = "compiling" if stacks.is_compiling() else None
            waits_in = stacks.waits_in()
        return Heartbeat(
            number=number,
            host=platform.node(),
            marks=progress.marks,
            mark=progress.mark_name,
            step=progress.step,
            idle_seconds=progress.idle_seconds,
            longest_idle_seconds=progress.longest_idle_seconds,
            exempt=exempt,
            waits_in=waits_in,
            broken_seconds=None if self._broken_since is None else time.monotonic() - self._broken_since,
            left=self._left,
            has_written=self._has_written,
            pid=os.getpid(),
            asked=self._asked,
        )

    # ---- the thread that judges: it never touches the store ----

    def _judge(self) -> None:
        newest, came = -1, 0.0  # the number of rank 0's newest heartbeat, and when it came
        last, answered = time.monotonic(), None
        while not self._over.wait(self._beat_seconds / 2):
            now = time.monotonic()
            if now - last > 3 * self._beat_seconds:
                # This rank itself was stopped, as in a suspended job: it must first hear the others again.
                newest = -1
            last, first = now, self._first
            if newest != first.number:
                newest, came = first.number, now
            # Made here by this rank's own clock: a store that is gone gives nothing back.
            own = PeerState(self._own_beat(0))
            is_first = self._store.rank == 0
            if (asked := first.asked) not in (None, answered):
                answered = asked
                self._begin_answer(self._folder.with_name(str(asked)), now)
            of_all = Digest.merged([Digest.of(own, self._beat_seconds), self._digest(now)])
            # Rank 0 looks at each rank only if something may be wrong: thousands take their time.
            is_suspect = is_first and of_all.is_suspect(self._heartbeat_seconds)
            self._asks_each = is_suspect or now < self._asks_until
            followed = self._below(now) if is_suspect else {}
            self._peers = {self._store.rank: own} | (followed if is_first else {0: PeerState(first, now - came)})
            verdict = self._verdict or (self._find(self._peers) if is_suspect or not is_first else None)
            if verdict is not None:
                self._silent = {
                    rank for rank, one in self._peers.items() if one.silent_seconds > 3 * self._beat_seconds
                }
                self._end(verdict)

    def _digest(self, now: float) -> Digest:
        return self._store.below.digest(now, self._beat_seconds)

    def _below(self, now: float) -> dict[int, PeerState]:
        return self._store.below.states(now, self._beat_seconds)

    def _find_requests(self) -> None:
        while not self._over.wait(_REQUEST_SECONDS):
            self._asked = requests.take_request(self._folder.parents[1]) or self._asked

    def _begin_answer(self, folder: Path, now: float) -> None:
        if self._store.rank == 0:
            self._asks_until = now + _EACH_SECONDS
            # At once, as each step of the way takes up to a beat.
            self._asks_each = True
            self._wake.set()
        threading.Thread(target=self._answer, args=(folder,), name="watch-answer", daemon=True).start()

    def _answer(self, folder: Path) -> None:
        # A rank that cannot write says nothing: `explain-hang` shows which ranks have not answered.
        with contextlib.suppress(OSError):
            self._write_stacks(folder)
            if self._store.rank == 0:
                # Until rank 0 asks for each, leaders tell of all ranks below them together.
                self._wait(_EACH_SECONDS, self._store.below.knows_each)
                own = self._own_beat(0)
                heard = {0: PeerState(own)} | self._below(time.monotonic())
                snapshot.write_beats(folder, heard, own, None)

    def _find(self, heard: dict[int, PeerState]) -> Diagnosis | None:
        found = find_left(heard, self._heartbeat_seconds) or find_lost(heard, self._heartbeat_seconds)
        if found is None and self._store.rank == 0 and self._store.below.knows_each():
            found = find_stalled(heard, self._heartbeat_seconds)
        return found

    def _end(self, verdict: Diagnosis) -> None:
        """Write stacks and one line, wait for those of the other ranks, and end the process."""
        is_own = self._verdict is None
        self._verdict = verdict
        self._wake.set()
        if verdict.is_alarm:
            _within(_LAST_WORDS_SECONDS, lambda: self._write_stacks(self._folder))
        if is_own:
            _within(_LAST_WORDS_SECONDS, lambda: self._report(verdict))
        self._let_others_write()
        os._exit(verdict.exit_code)

    def _let_others_write(self) -> None:
        """Wait for the stacks of the other ranks: a launcher ends all ranks as soon as one has ended."""
        is_host = self._store.rank == 0
        if not is_host and 0 in self._silent:
            # Rank 0 cannot say when all have written. Each other rank finds the verdict by itself, within a beat or so.
            time.sleep(min(2 * self._beat_seconds, _LAST_WORDS_SECONDS))
            return
        # Rank 0 waits until all ranks that still beat have written, and then says so; the others wait for its word.
        self._has_written = not is_host
        # Each leader on the way passes the verdict on a beat later.
        seconds = _LAST_WORDS_SECONDS + (self._store.below.depth - 1) * self._beat_seconds
        self._wait(seconds, self._have_others_written if is_host else lambda: self._first.has_written)
        if is_host:
            self._has_written = True
        if len(self._store.below):
            # The ranks below get the answer to their next beat from this process.
            time.sleep(4 * _HURRIED_BEAT_SECONDS)

    def _have_others_written(self) -> bool:
        beats = [one.beat for rank, one in self._below(time.monotonic()).items() if rank not in self._silent]
        return all(beat.has_written or beat.left is not None for beat in beats)

    def _wait(self, timeout_seconds: float, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and not is_done():
            time.sleep(_HURRIED_BEAT_SECONDS)

    def _write_stacks(self, folder: Path) -> None:
        beat = self._own_beat(0)
        header = (
            f"rank {self._store.rank} on {beat.host}, process {os.getpid()}: "
            f"after {beat.mark}, {beat.step} steps done, {beat.idle_seconds:.1f} s ago"
        )
        stacks.write_stacks(folder / f"rank-{self._store.rank:05d}.txt", header)
        snapshot.write_snapshot(folder, stacks.take_snapshot(self._store.rank, beat))

    def _report(self, verdict: Diagnosis) -> None:
        """Report the verdict, unless another rank has: without rank 0, each of the others finds it out."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / snapshot.REPORT).open("x", encoding="utf-8") as file:
                file.write(f"{verdict.line}\n")
            snapshot.write_beats(self._folder, self._peers, self._own_beat(0), verdict.line)
        except FileExistsError:
            return
        except OSError:
            # Reported twice is better than not at all.
            pass
        command = f"hfdist explain-hang {shlex.quote(str(self._folder.parents[1]))}"
        where = f"; stacks: {self._folder}; `{command}` compares them"
        logger.error("%s%s", verdict.line, where if verdict.is_alarm else "")
        self._record(verdict)


def _within(timeout_seconds: float, action: Callable[[], None]) -> None:
    """Run an action in a thread, and wait `timeout_seconds` for it at most; if it hangs or fails, go on without it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
