"""The data of islands that come and go: what counts is read once, whoever reads it."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.data.stream.ledger import read_records
from hfdist.records import RunFolder, read_lines
from hfdist.testing import RankFailed, run_ranks
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.run import prove_once
from tests.distributed.island_runs import (
    Island,
    die_at,
    difference,
    overrides_of,
    run_islands,
    served,
    shows,
    wait_at,
)
from tests.distributed.runs import SMALL, losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

KEYS = ("train.max_steps=18", "islands.every=3", "data.sequence_length=32", "data.lanes=24", "checkpoint=default",
        "checkpoint.every=4", "data.workers=1", "train.micro_batch_size=4")  # fmt: skip


def audit(folders, *keys):
    """What the audit of all says."""
    configs = {
        folder: compose_config([*SMALL, f"run.dir={folder}", *overrides_of("h:1", index, len(folders), *keys)])
        for index, folder in enumerate(folders)
    }
    first, *others = configs.items()
    return run_ranks(lambda: list(prove_once(open_past_run(*first, dict(others)))), 1, group=False)[0]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, ("strategy=single", "islands=streaming", "islands.fragments=1", "islands.overlap=1")),
        many(2, ("strategy=ddp",)),
    ],
    ids=["single, with overlap", "ddp"],
)
def test_what_a_lost_island_had_to_read_the_others_do(tmp_path, num_ranks, layout):
    sign = tmp_path / "is there"
    folders = [tmp_path / f"island-{index}" for index in range(3)]
    with served() as address:
        own = [overrides_of(address, index, 3, *layout, *KEYS) for index in range(3)]
        islands = [
            Island(folder, num_ranks, *own[index], at_start=wait_at(11, sign))
            for index, folder in enumerate(folders[:2])
        ]
        # Its checkpoint of step 4 stands in the middle of a round.
        mortal = Island(folders[2], num_ranks, *own[2], at_start=die_at(7))
        assert mortal.wait() is not None
        islands.append(Island(folders[2], num_ranks, *own[2], at_start=shows(sign)))
        failures = [island.wait() for island in islands]
        for island in (*islands, mortal):
            island.kill()
    assert failures == [None] * 3
    found = [weights(folder) for folder in folders]
    assert difference(found[0], found[1]) == difference(found[2], found[1]) == 0
    # Lanes of the lost one, which came back to it.
    for lane in range(2, 24, 3):
        readers = [folder for folder in folders if len(read_records(RunFolder(folder).ledger, lane))]
        assert folders[2] in readers
        assert len(readers) == 2
    with pytest.raises(RankFailed, match="other islands have read a part") as refused:
        audit(folders[:2], *layout, *KEYS, "islands.count=3")
    assert f"run={folders[0]},{folders[1]},FOLDER" in str(refused.value)
    said = audit(folders, *layout, *KEYS)
    assert said[-1].startswith("AUDIT: passed")
    # Two of 18 steps, and one of 6 before and 6 after; its seventh is read by others.
    assert f"3 islands, {(18 + 18 + 6 + 6) * 8} sequences of 24 lanes" in said[0]


def test_runs_begin_at_the_checkpoint_of_an_island(tmp_path):
    """An ordinary run, and islands of another number."""
    before = run_islands(tmp_path / "before", 2, 1, *KEYS, "train.max_steps=8", "data.workers=0")
    start = (f"checkpoint.resume={before[1]}/checkpoints/step-00000008", "checkpoint.allow_changes=true", *KEYS,
             "train.max_steps=12", "data.workers=0")  # fmt: skip
    own = (override for override in start if not override.startswith("islands."))
    alone = pretrain(tmp_path / "alone", 1, *own)
    folders = run_islands(tmp_path / "after", 3, 1, *start)
    wanted = losses(before[0])[0]
    for folder in (alone, *folders):
        assert [line["step"] for line in read_lines(RunFolder(folder).metrics) if "loss" in line] == list(range(9, 13))
        assert max(losses(folder)) < wanted
