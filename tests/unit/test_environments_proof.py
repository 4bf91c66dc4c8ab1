"""The runs of `make environments`: both sides see the same products, held-out ones are new, and the runs compose."""

import json

import pytest

from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from proofs.environments import (
    ACTED,
    NUM_HELD_OUT,
    PLAIN,
    Outcome,
    Wrong,
    describe,
    fine_tuning,
    is_better,
    read_outcome,
    tuning,
    write_rows,
)
from proofs.reinforcement import Cost


def test_both_sides_see_the_same_products_and_only_one_sees_calls(tmp_path):
    write_rows(tmp_path)

    def read(name):
        return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    acted, plain = ([row["messages"] for row in read(side.label)] for side in (ACTED, PLAIN))
    assert [(row[0], row[-1]) for row in acted] == [(row[0], row[-1]) for row in plain]
    assert {len(row) for row in plain} == {2}
    num_called = sum(len(row) == 4 for row in acted)
    assert abs(num_called / len(acted) - ACTED.share_of_calls) < 0.02
    held_out, prompts = ({row["prompt"][0]["content"] for row in read(name)} for name in ("held_out", "products"))
    assert len(held_out) == NUM_HELD_OUT
    assert not held_out & (prompts | {row[0]["content"] for row in acted})


@pytest.mark.parametrize("side", [ACTED, PLAIN], ids=lambda side: side.label)
def test_the_runs_of_a_side_compose(side, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path)
    sft = compose_config(fine_tuning(1, side), name="finetune")
    grpo = compose_config(tuning(1, side), name="tune")
    plan_run(sft, world_size=1)
    plan_run(grpo, world_size=1)
    assert grpo.model.name == f"{sft.run.dir}/model"
    assert (grpo.task.environment is None) == (side is PLAIN)


def test_a_wrong_copy_of_a_right_result_is_told_from_a_wrong_call(tmp_path):
    folder = tmp_path / f"grpo-{ACTED.label}-1"
    folder.mkdir()
    answers = [
        (20, 0.0, "12*34=", "408"),
        (21, 0.0, "12*34=", "408"),
        (21, 0.0, "12*34=", "36"),
        (21, 1.0, "5*5=", "25"),
    ]
    rows = [
        {"step": step, "reward": reward, "prompt": prompt, "turns": [{"role": "tool", "text": result}]}
        for step, reward, prompt, result in answers
    ]
    rows.append({"step": 40, "reward": 0.0, "prompt": "12*34="})  # one turn, which has no `turns`
    (folder / "rollouts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    evaluated = {"step": 0, "eval_reward": 0.5, "eval_tool_calls": 0.75}
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in (evaluated, {"step": 1, "loss": 1.0}))
    )
    outcome = read_outcome(tmp_path, 1, ACTED, Cost(9.0, 5.0), Cost(8.0, 4.0))
    assert (outcome.accuracies, outcome.calls, outcome.wrong) == ({0: 0.5}, {0: 0.75}, Wrong(3, 1))


def test_the_page_counts_the_seeds_with_which_the_calculator_is_better():
    def outcome(seed, side, start, end):
        return Outcome(seed, side, {0: start, 40: end}, {0: 0.25, 40: 1.0}, Wrong(8, 7), Cost(9.0, 5.0), Cost(8.0, 4.0))

    won = outcome(1, ACTED, 0.4, 0.9), outcome(1, PLAIN, 0.1, 0.2)
    fell = outcome(2, ACTED, 0.5, 0.4), outcome(2, PLAIN, 0.1, 0.2)
    behind = outcome(3, ACTED, 0.1, 0.2), outcome(3, PLAIN, 0.1, 0.3)
    assert [is_better(*pair) for pair in (won, fell, behind)] == [True, False, False]
    page = describe([*won, *fell, *behind])
    assert "With 1 of 3 seeds" in page
    assert "from 33.3% to 50.0%" in page
    assert "| 2 | with a calculator | 50.0% | 40.0% | 5 | 4 |" in page
    assert "| 2 | 0.25 | 1.00 | 8 | 7 |" in page
