"""A run whose disk is lost goes on from its mirror as if nothing had been lost; a mirror that fails ends no run."""

import os
import shutil
import signal
import time

import pytest
from transformers import TrainerCallback

from hfdist.checkpoint.folder import step_name
from hfdist.checkpoint.mirror import Mirror
from hfdist.collectives import gather_json
from hfdist.config.composition.compose import compose_config
from hfdist.errors import PreemptedError
from hfdist.records import RunFolder, read_lines, read_run
from hfdist.run.builder import Run
from hfdist.testing import RankFailed, run_ranks
from hfdist.verify.audit.past_run import open_past_run
from hfdist.verify.audit.run import prove_once
from proofs.layout_changes import LAYOUTS
from recipes.pretrain import main
from tests.distributed.replicas import END, SAVED, SETTINGS, DiesAfter, resumes
from tests.distributed.runs import losses, weights

pytestmark = pytest.mark.distributed

ONE, TWO = LAYOUTS["single"], LAYOUTS["ddp x2"]


class DiesOnceMirrored(DiesAfter):
    """Kills each rank after a step, once the mirror has all that was saved."""

    def on_step_begin(self, args, state, control, **named):
        if state.global_step == self._step:
            self._run.trainer.checkpointer.wait()
            assert self._run.uploader is None or self._run.uploader.wait(60)
            gather_json("the mirror has it")
            os.kill(os.getpid(), signal.SIGKILL)


def _live(config, killed_after):
    build = Run.build_trainer

    def build_mortal(run):
        build(run)
        run.trainer.add_callback(DiesOnceMirrored(run, killed_after))

    if killed_after is not None:
        Run.build_trainer = build_mortal
    main.__wrapped__(config)


def live(folder, layout, *overrides, killed_after=None):
    """Start the run in `folder` once."""
    config = compose_config([*SETTINGS, *layout.overrides, f"run.dir={folder}", "run.name=mirrored", *overrides])
    arguments = (_live, layout.num_ranks, config, killed_after)
    if killed_after is None:
        run_ranks(*arguments, group=layout.num_ranks > 1)
    else:
        with pytest.raises(RankFailed, match="died without a word"):
            run_ranks(*arguments, group=layout.num_ranks > 1)
    return folder


def events_of(folder, kind):
    return [line for line in read_lines(RunFolder(folder).events) if line["event"] == kind]


def test_a_lost_disk_costs_the_steps_since_the_last_save(tmp_path, cache_dir):
    whole = live(tmp_path / "whole", TWO)
    mirror = f"checkpoint.mirror=file://{tmp_path}/mirror"
    folder = live(tmp_path / "run", TWO, mirror, killed_after=SAVED + 2)
    shutil.rmtree(folder)
    live(folder, TWO, mirror)
    assert resumes(folder) == [(SAVED, False)]
    # The lines of the steps before came back, too, and what was read.
    assert losses(folder) == losses(whole)
    past = open_past_run(folder, compose_config([*SETTINGS, *TWO.overrides, f"run.dir={folder}"]))
    told = list(prove_once(past))
    assert f"steps 1 to {END}" in told[0]
    assert told[-1].startswith("AUDIT: passed")
    assert [line["start"] for line in events_of(folder, "start")] == [1, 2]
    # Of the start that was killed.
    assert [line["exit_code"] for line in events_of(folder, "end")] == [None]
    assert read_run(folder).start == 2
    assert all((weights(whole)[name] == value).all() for name, value in weights(folder).items())
    uploads = [line for line in events_of(folder, "mirror") if line["start"] == 2]
    assert [(upload["step"], upload["failed"]) for upload in uploads] == [(SAVED, 0), (END, 0)]
    # The checkpoint that came from there is not sent back.
    assert uploads[0]["sent_bytes"] == 0 < uploads[1]["sent_bytes"]
    assert sorted(path.name for path in (tmp_path / "mirror/mirrored").glob("step-*")) == [
        f"{step_name(step)}.json" for step in (SAVED, END)
    ]


def test_a_mirror_that_fails_ends_no_training(tmp_path, cache_dir):
    place = tmp_path / "mirror/mirrored"
    place.mkdir(parents=True)
    # Nothing can be written into it.
    (place / "contents").write_text("a file")
    mirror = f"checkpoint.mirror=file://{tmp_path}/mirror"
    folder = live(tmp_path / "run", ONE, mirror, "train.max_steps=8")
    assert len(losses(folder)) == END
    failed = events_of(folder, "mirror")
    assert [upload["failures"] for upload in failed] == [*range(1, len(failed) + 1)]
    assert failed[-1]["step"] == END
    [alert] = events_of(folder, "alert")
    assert alert["kind"] == "mirror"
    assert "has no checkpoint" in alert["text"]


class Stops(TrainerCallback):
    """Sends this process a signal to stop before a step."""

    def on_step_begin(self, args, state, control, **named):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _stop(config):
    build, send = Run.build_trainer, Mirror.send

    def send_slowly(mirror, *arguments):
        # The training has ended by then.
        time.sleep(1)
        return send(mirror, *arguments)

    def build_stopped(run):
        build(run)
        run.trainer.add_callback(Stops())

    Run.build_trainer, Mirror.send = build_stopped, send_slowly
    with pytest.raises(PreemptedError):
        main.__wrapped__(config)


def test_a_run_that_is_told_to_stop_leaves_nothing_behind(tmp_path, cache_dir):
    mirror = f"checkpoint.mirror=file://{tmp_path}/mirror"
    config = compose_config([*SETTINGS, *ONE.overrides, f"run.dir={tmp_path}/run", "run.name=stopped", mirror])
    run_ranks(_stop, ONE.num_ranks, config, group=False)
    [path] = (tmp_path / "run/checkpoints").glob("step-*")
    assert path.name != step_name(SAVED)
    assert (tmp_path / f"mirror/stopped/{path.name}.json").is_file()
    [upload] = events_of(tmp_path / "run", "mirror")
    assert step_name(upload["newest_step"]) == path.name
