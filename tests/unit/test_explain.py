"""What snapshots tell, where no test can have them: NCCL's messages, other disks, files that are damaged."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

from hfdist.records import RunRecord, State
from hfdist.records.run_file import write_run
from hfdist.tools.explain_hang import explain, explain_folder
from hfdist.watch.heartbeat import Heartbeat, PeerState
from hfdist.watch.requests import request, take_request
from hfdist.watch.snapshot import Collective, Frame, Snapshot, read_snapshots, write_beats, write_snapshot

DEEP = "[" * 100_000


def beat(rank, **more):
    return Heartbeat(number=9, host=f"node-{rank}", marks=5, step=7, idle_seconds=61.0, pid=100 + rank, **more)


def snapshot(folder, rank, *collectives, groups=None, frames=(), **more):
    write_snapshot(folder, Snapshot(rank=rank, beat=beat(rank, **more), collectives=[*collectives],
                                    groups=groups or {"0": [0, 1, 2]}, frames=[*frames]))  # fmt: skip


def test_a_stage_that_waits_for_a_message_leads_to_the_one_that_hangs(tmp_path):
    """Rank 2 waits for rank 1, which waits for rank 0."""
    snapshot(tmp_path, 0, frames=[Frame("/x/models/own.py", 12, "forward")])
    snapshot(tmp_path, 1, Collective("0", 4, "nccl:recv 1<-0", [[8]], False, "pipeline", True))
    snapshot(tmp_path, 2, Collective("0", 9, "nccl:recv 2<-1", [[8]], False, "pipeline", True))
    found = explain_folder(tmp_path, "x")
    assert [(wait.waiting, wait.awaited) for wait in found.waits] == [([1], [0]), ([2], [1])]
    assert "for rank 0, which never came to it: runs its own code, after the start at models/own.py:12" in found.verdict


def test_groups_of_one_name_and_other_ranks_are_not_compared(tmp_path):
    for rank, name in enumerate(["gloo:all_reduce", "gloo:all_reduce", "gloo:barrier", "gloo:barrier"]):
        groups = {"7": [0, 1] if rank < 2 else [2, 3]}
        snapshot(tmp_path, rank, Collective("7", 3, name, [], False), groups=groups)
    assert "are all in all_reduce" in explain_folder(tmp_path, "x").verdict


def test_a_silent_rank_of_another_machine_is_not_said_to_be_dead(tmp_path):
    snapshot(tmp_path, 0, Collective("0", 3, "gloo:all_reduce", [[3]], False))
    # So soon after a connection has broken, the watch ends the run.
    peers = {0: PeerState(beat(0)), 1: PeerState(beat(1), 1.3), 2: PeerState(beat(2), 0.1)}
    write_beats(tmp_path, peers, beat(0), "rank 0 waits for rank 1")
    found = explain_folder(tmp_path, "x")
    assert found.verdict.startswith("rank 1 (on node-1, process 101) is dead, stopped or cut off")
    assert found.hint.startswith("ssh node-1 ps 101")
    assert found.rows[2].does == "beats; its stack is not here"
    assert [(wait.waiting, wait.awaited) for wait in found.waits] == [([0], [1])]


def test_damaged_files_are_left_out(tmp_path):
    snapshot(tmp_path, 0)
    odd = json.loads((tmp_path / "rank-00000.json").read_text()) | {"rank": 6, "beat": [*beat(6, mark=7)]}
    unplaced = json.loads((tmp_path / "rank-00000.json").read_text()) | {"rank": 7, "frames": [["own.py"]]}
    texts = ["", "[]", '{"rank": 3}', json.dumps({"beat": [1] * 99}), "\0", json.dumps(odd), DEEP, json.dumps(unplaced)]
    for number, text in enumerate(texts, 1):
        (tmp_path / f"rank-{number:05d}.json").write_text(text)
    (tmp_path / "report.txt").write_bytes("rank 0 waits ó".encode()[:-1])
    for text in ('{"ranks": []}', DEEP):
        (tmp_path / "beats.json").write_text(text)
        assert list(read_snapshots(tmp_path)) == [0]
        assert explain_folder(tmp_path, "x").rows[0].rank == 0


def test_a_record_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": 1, "sta')
    assert explain(tmp_path).run.endswith("run.json is missing or cannot be read")


def test_a_time_that_is_none_leaves_the_stacks(tmp_path):
    stacks = tmp_path / "watch" / "20260102-030405"
    stacks.mkdir(parents=True)
    snapshot(stacks, 0)
    (tmp_path / "run.json").write_text(
        '{"schema": 1, "start": 1, "state": "failed", "exit_code": 6, "started": "noon"}'
    )
    found = explain(tmp_path)
    assert found.run.endswith("failed with exit code 6, 0 steps done, 1 rank")
    assert found.folder == stacks


def test_what_was_asked_while_all_was_well_tells_nothing_of_later(tmp_path):
    asked = tmp_path / "watch" / "asked-20260102-030405"
    for rank in (0, 1):
        write_snapshot(asked, Snapshot(rank=rank, beat=beat(rank)._replace(idle_seconds=0.2)))
    write_run(tmp_path, RunRecord(start=1, state=State.failed, exit_code=1, error="out of memory"), is_durable=False)
    found = explain(tmp_path)
    assert (found.verdict, found.folder) == ("nothing hung in the last start: it ended as failed (out of memory)", None)


def test_a_rank_between_two_beats_is_waited_for(tmp_path):
    """It has not seen the request when rank 0 has written what it has heard."""
    write_run(tmp_path, RunRecord(start=1, processes=2), is_durable=False)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(explain, tmp_path)
        while (name := take_request(tmp_path)) is None:
            time.sleep(0.01)
        folder = tmp_path / "watch" / name
        snapshot(folder, 0)
        write_beats(folder, {0: PeerState(beat(0)), 1: PeerState(beat(1), 1.6)}, beat(0), None)
        time.sleep(0.3)
        snapshot(folder, 1, frames=[Frame("/x/models/own.py", 12, "forward")])
    assert found.result().rows[1].where == "models/own.py:12 forward"


def test_a_request_names_no_other_folder(tmp_path):
    for name in ("../outside", "asked-20260102-030405/..", "report.txt"):
        request(tmp_path, name)
        assert take_request(tmp_path) is None
    request(tmp_path, "asked-20260102-030405")
    assert take_request(tmp_path) == "asked-20260102-030405"
    assert take_request(tmp_path) is None


def test_a_request_that_cannot_be_read_is_removed_as_well(tmp_path):
    request(tmp_path, "asked-20260102-030405")
    file = tmp_path / "watch" / "request"
    for text in ("", "\0", DEEP):
        file.write_text(text)
        assert take_request(tmp_path) is None
        assert not file.exists()


def test_a_snapshot_with_values_of_other_types_is_left_out(tmp_path):
    snapshot(tmp_path, 0, Collective("0", 3, "gloo:all_reduce", [[3]], False))
    whole = json.loads((tmp_path / "rank-00000.json").read_text())
    damaged = [{"groups": []}, {"groups": {"0": "all"}}]
    damaged += [{"collectives": [["0", "third", "gloo:all_reduce", [[3]], False, "", False]]}]
    damaged += [{"collectives": [["0", 3, "gloo:all_reduce", [3], False, "", False]]}]
    for number, other in enumerate(damaged, 1):
        (tmp_path / f"rank-{number:05d}.json").write_text(json.dumps(whole | other | {"rank": number}))
    assert [row.rank for row in explain_folder(tmp_path, "x").rows] == [0]
