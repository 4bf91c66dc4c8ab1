"""A simulated step of a pipeline: each rank takes the most urgent action whose input has arrived."""

from hfdist.pipeline.timeline import Action, Event


def simulate(p, m, *, v=1, zero_bubble=False, forward_seconds=0.02, send_seconds=0.0):
    """Events of p ranks with v stages each, for m micro batches; without zero bubble and with v = 1 this is 1F1B.

    Forwards of one micro batch take `forward_seconds` of a rank, backwards twice that, in one piece or in two.
    """
    last_stage = p * v - 1
    backward = Action.backward_input if zero_bubble else Action.backward
    unit_seconds = forward_seconds / v
    length = {Action.forward: unit_seconds, Action.backward_weight: unit_seconds, Action.backward: 2 * unit_seconds}
    length[Action.backward_input] = unit_seconds
    arrives_seconds = {(0, Action.forward, microbatch): 0.0 for microbatch in range(m)}
    free_seconds, in_flight, times, events = [0.0] * p, [0] * p, {0.0}, []
    most_in_flight = [p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p)]

    def urgency(work):
        stage, action, microbatch = work
        chunk = stage // p if action is Action.forward else -(stage // p)
        return (backward, Action.forward, Action.backward_weight).index(action), microbatch // p, chunk, microbatch % p

    works = [(stage, Action.forward, microbatch) for stage in range(p * v) for microbatch in range(m)]
    forwards = [sorted((work for work in works if work[0] % p == rank), key=urgency) for rank in range(p)]

    def may_start(rank, work):
        """Forwards go in order, and only while few micro batches are in flight; the others go when they can."""
        return work[1] is not Action.forward or (work == forwards[rank][0] and in_flight[rank] < most_in_flight[rank])

    def record(rank, work, action, seconds):
        start = free_seconds[rank]
        free_seconds[rank] += seconds
        if seconds > 0:
            named = {"rank": rank, "stage": work[0], "action": action, "microbatch": work[2]}
            events.append(Event(**named, start_seconds=start, stop_seconds=free_seconds[rank]))

    def run(rank, work, now):
        stage, action, microbatch = work
        record(rank, work, Action.wait, now - free_seconds[rank])
        record(rank, work, action, length[action])
        in_flight[rank] += {Action.forward: 1, backward: -1}.get(action, 0)
        follows = []
        if action is Action.forward:
            forwards[rank].pop(0)
            follows = [(stage + 1, action, microbatch) if stage < last_stage else (stage, backward, microbatch)]
        elif action is backward:
            follows = [(stage - 1, backward, microbatch)] * (stage > 0)
            follows += [(stage, Action.backward_weight, microbatch)] * zero_bubble
        if any(other[0] != stage for other in follows):
            record(rank, work, Action.send, send_seconds)
        arrives_seconds.update(dict.fromkeys(follows, free_seconds[rank]))
        times.add(free_seconds[rank])

    while times:
        now = min(times)
        times.remove(now)
        for rank in range(p):
            ready = [
                work
                for work, arrival in arrives_seconds.items()
                if work[0] % p == rank and arrival <= now and may_start(rank, work)
            ]
            if ready and free_seconds[rank] <= now:
                work = min(ready, key=urgency)
                del arrives_seconds[work]
                run(rank, work, now)
    assert not arrives_seconds
    return events
