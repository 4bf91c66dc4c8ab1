"""Every packing and a mixture trains the same in every layout, and data that end stop all ranks at once."""

import json
import math

import numpy as np
import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.data import TokenStream
from hfdist.records import RunFolder, read_lines
from hfdist.verify.audit.past_run import batches_of_steps, open_past_run
from hfdist.verify.audit.run import prove_once
from hfdist.verify.audit.step_contents import describe_step
from tests.distributed.runs import SMALL, eval_losses, losses, pretrain
from tests.marks import many
from tests.unit.data.corpora import texts

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two files of documents: a long one and a short one."""
    folder = tmp_path_factory.mktemp("data")
    for name, some in (("a", texts()[:60]), ("b", texts()[60:])):
        rows = "".join(json.dumps({"text": text[: 300 + 20 * n]}) + "\n" for n, text in enumerate(some))
        (folder / f"{name}.jsonl").write_text(rows)
    return (
        "data=mixture",
        f"+data.sources.a.path={folder}/a.jsonl",
        f"+data.sources.b.path={folder}/b.jsonl",
        "data.lanes=8",
        "data.eval_fraction=0.1",
        "train.max_steps=6",
    )


MIXTURE = ("+data.sources.a.weight=3", "+data.sources.b.weight=1", "data.anneal=[{step: 3, weights: {a: 1, b: 1}}]")


@pytest.mark.parametrize(
    ("packing", "strategy"), [("concat", "ddp"), many("best_fit", "pipeline"), many("none", "zero2")]
)
def test_a_packing_trains_the_same_in_every_layout(tmp_path, sources, cache_dir, packing, strategy):
    """And what was read of each source is reported at each save."""
    settings = (*sources, *MIXTURE, f"data.packing={packing}")
    alone = pretrain(tmp_path / "single", 1, "strategy=single", *settings)
    saves = ("checkpoint=default", "checkpoint.every=3", "checkpoint.keep=2")
    run = pretrain(tmp_path / strategy, 2, f"strategy={strategy}", *settings, *saves)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    lines = [line for line in read_lines(RunFolder(run).metrics) if "data/a/share" in line]
    assert [(line["step"], line["data/a/share"]) for line in lines] == [(3, 0.75), (6, (18 + 12) / 48)]
    assert packing != "concat" or lines[-1]["data/b/tokens"] == 18 * 64
    assert sorted(path.name for path in (run / "ledger").glob("lane-*")) == [f"lane-{n:05d}.records" for n in range(8)]


@pytest.mark.parametrize("strategy", ["ddp", many("pipeline")])
def test_data_that_end_stop_the_run_after_the_last_document(tmp_path, sources, cache_dir, strategy):
    """With fewer sequences in a batch than lanes, some batches are only of lanes that have ended.

    They take no step, and are not the end."""
    settings = (*sources, "+data.sources.a.epochs=1", "+data.sources.b.epochs=1", "train.max_steps=1000")
    settings = (*settings, "data.sequence_length=512", "train.global_batch_size=2", "train.micro_batch_size=1")
    settings = (*settings, "train.eval_every=1000", "checkpoint=default", "checkpoint.every=1000")
    folder = pretrain(tmp_path, 2, *settings, f"strategy={strategy}")
    before = losses(folder)
    num_steps = len(before)
    assert 2 < num_steps < 100
    steps = [line["step"] for line in read_lines(RunFolder(folder).metrics) if "loss" in line]
    assert steps == list(range(1, num_steps + 1))
    assert eval_losses(folder)
    assert (folder / "model" / "model.safetensors").is_file()
    config = compose_config([*SMALL, f"run.dir={folder}", *settings, f"strategy={strategy}"])
    check_whole_reading(open_past_run(folder, config), num_steps)
    # The last step was saved, so the same command again has nothing left to do.
    assert losses(pretrain(tmp_path, 1, *settings, "strategy=single")) == before


def check_whole_reading(run, num_steps):
    """All documents were read once, in batches of which some took no step."""
    ((step, cursor),) = run.cursors
    assert step == num_steps
    _, batches = batches_of_steps(run.ledger, 2)
    assert len(batches) == num_steps
    assert any(np.diff(batches) > 1)
    plan = TokenStream(run.corpus, run.tokenizer, run.config.data).plan
    assert all(
        plan.is_finished(pool, lane, progress.place)
        for lane, state in cursor.lanes.items()
        for pool, progress in enumerate(state.pools)
    )
    said = list(prove_once(run))
    assert said[-1].startswith("AUDIT: passed")
    assert f"steps 1 to {num_steps}, " in said[0]
    assert any("tokens" in line for line in describe_step(run, num_steps, shows_all_text=False))


def test_epochs_end_the_run_with_the_learning_rate_at_its_end(tmp_path, sources, cache_dir):
    settings = (*sources, "train.epochs=2", "train.max_steps=null", "data.sequence_length=512")
    settings = (*settings, "optimizer.schedule=linear", "optimizer.warmup_steps=0", "optimizer.warmup_fraction=0.2")
    run = pretrain(tmp_path, 1, *settings)
    rates = [line["learning_rate"] for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    num_warmup_steps = math.ceil(0.2 * len(rates))
    assert rates[num_warmup_steps] == max(rates) == 3e-3
    assert rates[-1] == pytest.approx(3e-3 / (len(rates) - num_warmup_steps))
