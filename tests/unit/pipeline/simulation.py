"""A simulated step of a pipeline: each rank takes the most urgent action whose input has arrived."""

from typing import NamedTuple

from hfdist.pipeline.timeline import Action, Event


def simulate(p, m, *, v=1, zero_bubble=False, forward_seconds=0.02, send_seconds=0.0):
    """Events of p ranks with v stages each, for m micro batches; without zero bubble and with v = 1 this is 1F1B.

    Forwards of one micro batch take `forward_seconds` of a rank, backwards twice that, in one piece or in two.
    """
    pipeline = _Pipeline(p, m, v, zero_bubble, forward_seconds / v, send_seconds)
    while pipeline.times:
        now = min(pipeline.times)
        pipeline.times.remove(now)
        for rank in range(p):
            ready = pipeline.ready(rank, now)
            if ready and pipeline.free_seconds[rank] <= now:
                pipeline.run(rank, min(ready, key=pipeline.urgency), now)
    assert not pipeline.arrives_seconds
    return pipeline.events


class _Work(NamedTuple):
    stage: int
    action: Action
    microbatch: int


class _Pipeline:
    def __init__(self, p, m, v, zero_bubble, unit_seconds, send_seconds):
        self.p, self.zero_bubble, self.send_seconds = p, zero_bubble, send_seconds
        self.last_stage = p * v - 1
        self.backward = Action.backward_input if zero_bubble else Action.backward
        self.length = {
            Action.forward: unit_seconds,
            Action.backward: 2 * unit_seconds,
            Action.backward_input: unit_seconds,
            Action.backward_weight: unit_seconds,
        }
        self.arrives_seconds = {_Work(0, Action.forward, microbatch): 0.0 for microbatch in range(m)}
        self.free_seconds, self.in_flight, self.times, self.events = [0.0] * p, [0] * p, {0.0}, []
        self.most_in_flight = [p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p)]
        works = [_Work(stage, Action.forward, microbatch) for stage in range(p * v) for microbatch in range(m)]
        self.forwards = [
            sorted((work for work in works if work.stage % p == rank), key=self.urgency) for rank in range(p)
        ]

    def urgency(self, work):
        stage, action, microbatch = work
        kind = (self.backward, Action.forward, Action.backward_weight).index(action)
        chunk = stage // self.p if action is Action.forward else -(stage // self.p)
        return kind, microbatch // self.p, chunk, microbatch % self.p

    def ready(self, rank, now):
        return [
            work
            for work, arrival in self.arrives_seconds.items()
            if work.stage % self.p == rank and arrival <= now and self._may_start(rank, work)
        ]

    def _may_start(self, rank, work):
        """Forwards go in order, and only while few micro batches are in flight; the others go when they can."""
        if work.action is not Action.forward:
            return True
        return work == self.forwards[rank][0] and self.in_flight[rank] < self.most_in_flight[rank]

    def run(self, rank, work, now):
        del self.arrives_seconds[work]
        self._record(rank, work, Action.wait, now - self.free_seconds[rank])
        self._record(rank, work, work.action, self.length[work.action])
        self.in_flight[rank] += {Action.forward: 1, self.backward: -1}.get(work.action, 0)
        if work.action is Action.forward:
            self.forwards[rank].pop(0)
        follows = self._follows(work)
        if any(other.stage != work.stage for other in follows):
            self._record(rank, work, Action.send, self.send_seconds)
        self.arrives_seconds.update(dict.fromkeys(follows, self.free_seconds[rank]))
        self.times.add(self.free_seconds[rank])

    def _follows(self, work):
        """What can begin once this is done."""
        if work.action is Action.forward:
            if work.stage < self.last_stage:
                return [work._replace(stage=work.stage + 1)]
            return [work._replace(action=self.backward)]
        if work.action is self.backward:
            before = [work._replace(stage=work.stage - 1)] if work.stage > 0 else []
            return before + [work._replace(action=Action.backward_weight)] * self.zero_bubble
        return []

    def _record(self, rank, work, action, seconds):
        start = self.free_seconds[rank]
        self.free_seconds[rank] += seconds
        if seconds > 0:
            named = {"rank": rank, "stage": work.stage, "action": action, "microbatch": work.microbatch}
            self.events.append(Event(**named, start_seconds=start, stop_seconds=self.free_seconds[rank]))
