"""A killed run goes on from memory as from the disk, bit by bit; and from the disk where memory has nothing sound."""

import errno
import shutil
import time
from dataclasses import replace

import pytest
import torch

from hfdist.checkpoint.folder import step_name
from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.checkpointing import checkpointer
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.run import prove_once
from proofs import kills
from proofs.layout_changes import LAYOUTS, Layout
from tests.distributed.processes import Life, Victim
from tests.distributed.replicas import (
    KILLED,
    SAVED,
    SETTINGS,
    copy_of,
    flip_bit,
    live,
    memory_of,
    replicas_in,
    resumes,
    wipe,
)
from tests.distributed.runs import losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed


def assert_same(run, other):
    assert losses(run) == losses(other)
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.many  # below a run goes on from both in its own layout; others read replicas in tests/unit/checkpoint
@pytest.mark.parametrize(("before", "after"), [("zero1 x2", "fsdp2 x2"), ("pp2", "zero3 x2")])
def test_from_memory_as_from_the_disk(tmp_path, cache_dir, before, after):
    """Killed after the step of a checkpoint, so that both have the same state."""
    killed = tmp_path / "killed"
    killed.mkdir()
    live(killed, LAYOUTS[before], killed_after=SAVED)
    ours = live(copy_of(killed, tmp_path / "memory"), LAYOUTS[after])
    theirs = copy_of(killed, tmp_path / "disk")
    wipe(theirs, 0)
    theirs = live(theirs, LAYOUTS[after])
    assert (resumes(ours), resumes(theirs)) == ([(SAVED, True)], [(SAVED, False)])
    assert_same(ours, theirs)


@pytest.mark.parametrize("machines", [[0, 1], many([0, 0, 1, 1])])
def test_a_machine_that_is_lost_costs_no_step(tmp_path, cache_dir, machines):
    """Two machines; one loses its memory between two saves, and another time a bit flips in both copies."""
    layout, killed = Layout(len(machines), ("strategy=zero1",)), tmp_path / "killed"
    killed.mkdir()
    live(killed, layout, killed_after=KILLED, machines=machines)
    assert [len(replicas_in(memory_of(machine, killed))) for machine in (0, 1)] == [1, 1]
    damaged = copy_of(killed, tmp_path / "damaged")
    wipe(killed, 1)
    run = live(killed, layout, machines=machines)
    assert resumes(run) == [(KILLED, True)]
    for machine in (0, 1):
        assert replicas_in(memory_of(machine, killed)) == []
        flip_bit(*replicas_in(memory_of(machine, damaged)))
    by_disk = live(damaged, layout, machines=machines)
    assert resumes(by_disk) == [(SAVED, False)]
    assert_same(run, by_disk)
    config = compose_config([*SETTINGS, *layout.overrides, f"run.dir={run}"])
    *_, verdict = run_ranks(lambda: list(prove_once(open_past_run(run, config))), 1, group=False)[0]
    assert verdict.startswith("AUDIT: passed")


@pytest.fixture(scope="module")
def killed(tmp_path_factory, cache_dir):
    """Between two checkpoints, in the layout `fsdp2 x2`."""
    folder = tmp_path_factory.mktemp("killed")
    live(folder, LAYOUTS["fsdp2 x2"], killed_after=KILLED)
    return folder


def test_a_damaged_newest_checkpoint_gives_way_to_a_replica_that_is_newer_than_the_others(tmp_path, killed):
    layout, folder = LAYOUTS["fsdp2 x2"], copy_of(killed, tmp_path / "damaged")
    saved = folder / "run/checkpoints" / step_name(SAVED)
    newest = shutil.copytree(saved, saved.with_name(step_name(KILLED + 1)))
    flip_bit(newest)
    assert resumes(live(folder, layout)) == [(KILLED, True)]


def test_a_replica_that_cannot_be_read_after_all_is_removed_and_the_next_start_is_from_the_disk(
    tmp_path, killed, monkeypatch
):
    layout, read = LAYOUTS["fsdp2 x2"], checkpointer.read_checkpoint
    folder = copy_of(killed, tmp_path / "unreadable")

    def read_or_fail(path, *arguments, **named):
        if "memory-0" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path, *arguments, **named)

    monkeypatch.setattr(checkpointer, "read_checkpoint", read_or_fail)
    with pytest.raises(RankFailed, match="the same command starts from the disk"):
        live(folder, layout)
    assert replicas_in(memory_of(0, folder)) == []
    assert resumes(live(folder, layout))[-1] == (SAVED, False)


@pytest.mark.many
def test_killed_at_any_moment_every_sequence_is_read_once(tmp_path, cache_dir):
    """While a replica is written, between two, and with other numbers of ranks: as a run that nobody kills."""
    texts, run_dir, whole, memory = (
        kills.write_texts(tmp_path / "texts"),
        *(tmp_path / n for n in ("run", "whole", "m")),
    )
    memory.mkdir()

    def config(folder, strategy):
        made = kills.make_config(folder, texts, 24, strategy)
        return replace(made, checkpoint=replace(made.checkpoint, replicate_every=1, replicate_dir=str(memory)))

    Life(config(whole, "single"), 1, tmp_path / "whole.log").join()
    for number, (strategy, num_ranks) in enumerate([("ddp", 2), ("ddp", 3), ("ddp", 2)]):
        before = {path.name for path in replicas_in(memory)}

        def is_replicated(before=before):
            return {path.name for path in replicas_in(memory)} - before

        life = Life(config(run_dir, strategy), num_ranks, tmp_path / f"{number}.log")
        # A first one is whole, and another is begun.
        assert life.wait(is_replicated)
        assert life.wait(lambda: list(memory.glob("hfdist-*/*/*.tmp-*")))
        time.sleep(0.02 * number)
        life.aim(Victim.rank if number else Victim.everyone, number)()
        life.end()
        assert not life.has_finished
    last = config(run_dir, "ddp")
    Life(last, 2, tmp_path / "last.log").join()
    assert [in_memory for _, in_memory in resumes(run_dir)] == [True] * 3
    comparison = kills.compare(run_dir, whole, last)
    assert max(comparison.loss, comparison.held_out_loss) <= kills.BOUND


@pytest.mark.parametrize(
    ("override", "what"),
    [("checkpoint.every=null", "this run saves nothing"), ("checkpoint.replicate_dir=/nowhere", "a folder in memory")],
)
def test_a_config_that_cannot_replicate_is_refused(override, what):
    from hfdist.config.checks.preflight import check_run

    with pytest.raises(ConfigError, match=what):
        check_run(compose_config([*SETTINGS, "checkpoint.replicate_every=2", override]))
