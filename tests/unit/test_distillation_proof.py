"""The runs of `make distillation`: both sides read the same, begin alike, and the page says which is lower."""

from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from proofs.distillation import DISTILLED, NEXT_TOKENS, Outcome, describe, distilling, pretraining, teaching
from proofs.reinforcement import Cost


def test_the_sides_differ_in_the_teacher_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher, plain = (compose_config(words, name="pretrain") for words in (teaching(), pretraining(1)))
    distilled = compose_config(distilling(1), name="tune")
    for config in (teacher, plain, distilled):
        plan_run(config, world_size=1)
    assert distilled.task.teacher == f"{teacher.run.dir}/model"
    ours, theirs = to_values(distilled), to_values(plain)
    for group in ("model", "data", "evaluate", "strategy"):
        assert ours[group] == theirs[group], group
    # What tunes a model has other habits: all that decides an update is said in both.
    for group, keys in (
        ("train", ("max_steps", "global_batch_size", "micro_batch_size", "seed", "precision", "epochs")),
        ("optimizer", tuple(ours["optimizer"])),
    ):
        assert {key: ours[group][key] for key in keys} == {key: theirs[group][key] for key in keys}
    assert teacher.data == plain.data


def test_the_page_counts_the_seeds_with_which_the_teacher_helps():
    def outcome(seed, plain, distilled):
        losses = {NEXT_TOKENS: plain, DISTILLED: distilled}
        return Outcome(seed, losses, {NEXT_TOKENS: Cost(9.0, 20.0), DISTILLED: Cost(9.0, 40.0)})

    page = describe(3.0, Cost(9.0, 100.0), [outcome(1, 4.0, 3.5), outcome(2, 4.0, 4.25)])
    assert "With 1 of 2 seeds the distilled student has the lower loss. The mean gain is 0.125 nats" in page
    assert "11.8% lower" in page
    assert "| 1 | 4.000 | 3.500 | +0.500 | 20 | 40 |" in page
    assert "| 2 | 4.000 | 4.250 | -0.250 | 20 | 40 |" in page
