"""A signal to one process: all ranks save the same step and end, and the run goes on as if nothing had been."""

import signal

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.trainer.reporting.callbacks import METRICS, read_metrics
from tests.distributed.kills import newest_whole
from tests.distributed.processes import Life, assert_gone
from tests.distributed.runs import SMALL, losses, pretrain

pytestmark = pytest.mark.distributed

STEPS = 60
SETTINGS = ("checkpoint=default", "checkpoint.every=1000", f"train.max_steps={STEPS}", "optimizer.lr=5e-4",
            "data.workers=1")  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache_dir):
    return losses(pretrain(tmp_path_factory.mktemp("whole"), 1, "strategy=single", *SETTINGS))


def test_all_ranks_stop_at_one_step_and_go_on_when_a_loader_is_told(tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    config = compose_config([*SMALL, f"run.dir={run_dir}", "strategy=zero2", *SETTINGS])
    life = Life(config, 2, tmp_path / "log")
    assert life.wait(lambda: len(read_metrics(run_dir / METRICS)) >= 3), life.log.read_text()
    life.loaders()[0].send_signal(signal.SIGTERM)
    life.end()
    said = life.log.read_text()
    assert "PreemptedError" in said, said
    last = read_metrics(run_dir / METRICS)[-1]["step"]
    assert f"SIGTERM: saving after step {last}, and stopping" in said
    assert last < STEPS
    assert newest_whole(run_dir) == f"step-{last:08d}"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert_gone([life.group])

    again = Life(config, 2, tmp_path / "log-2")
    again.join()
    steps = [line["step"] for line in read_metrics(run_dir / METRICS) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
    assert losses(run_dir) == pytest.approx(uninterrupted, rel=1e-5)
