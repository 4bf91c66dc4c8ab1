"""GRPO and RLOO: TRL's own losses and weights with the same answers, and the same in every layout."""

from functools import cache

import pytest

from hfdist.records import RunFolder, read_lines
from hfdist.rewards.registry import GROUP
from hfdist.testing import run_ranks
from tests.distributed import policy_runs, trl_runs
from tests.distributed.preference_runs import STEPS, make_config, read_answers, tune
from tests.distributed.runs import eval_losses, losses, weights
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

BETA = ("task.beta=0.5",)
LOSSES = {
    "gspo": ("grpo", "task.loss=gspo", "task.mask_truncated=true", *BETA),
    "rloo": ("rloo", "task.temperature=1.5", *BETA),
    **{
        name: ("grpo", f"task.loss={name}", *BETA)
        for name in ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
    },
    "gspo alone": ("grpo", "task.loss=gspo", "task.mask_truncated=true"),
    "unscaled grpo": ("grpo", "task.loss=grpo", "task.scale_rewards=false", *BETA),
    "grpo by batch": ("grpo", "task.loss=grpo", "task.scale_rewards=batch", *BETA),
    "reinforce_pp": ("grpo", "task.loss=reinforce_pp", "task.mask_truncated=true", *BETA),
}
"""A task and what it is given, by the name of its loss."""


def run_task(folder, model, sums, task, num_ranks, *overrides):
    return tune(folder, model, sums, num_ranks, f"task={task}", *policy_runs.COMMON, *overrides)


@pytest.fixture(scope="module")
def single(tmp_path_factory, policy, sums, cache_dir):
    """A run of each loss on one process, made when it is asked for."""
    folder = tmp_path_factory.mktemp("single")

    @cache
    def run(loss):
        task, *own = LOSSES[loss]
        return run_task(folder / loss, policy, sums, task, 1, *own)

    return run


def lines(run):
    return [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]


def check_same(run, reference):
    for ours, theirs in zip(lines(run), lines(reference), strict=True):
        for name in ("reward", "reward_std", "rewards/arithmetic", "dead_groups", "completion_tokens", "cut_off"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=1e-5)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        # Advantages of a group add up to nothing: what is left of the loss is small.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
    assert eval_losses(run) == eval_losses(reference)
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5
    assert max(line["reward_std"] for line in lines(run)) > 0
    assert 0 < sum(line["dead_groups"] for line in lines(run)) < STEPS


# One begins in a pipeline, and goes on in DDP, below.
@pytest.mark.parametrize(
    ("loss", "strategy", "num_ranks"),
    [
        many("grpo", "ddp", 2),
        many("grpo", "zero3", 2),
        many("gspo", "pipeline", 2),
        *(many(loss, "pipeline", 2) for loss in ("dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "reinforce_pp")),
        many("rloo", "fsdp2", 2),
        many("rloo", "3d train.micro_batch_size=1", 8),
        many("reinforce_pp", "3d train.micro_batch_size=1", 8),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, policy, sums, loss, strategy, num_ranks):
    task, *own = LOSSES[loss]
    layout = f"strategy={strategy}".split()
    check_same(run_task(tmp_path, policy, sums, task, num_ranks, *own, *layout), single(loss))


LIKE_TRL = {
    # TRL takes a <pad> for an end: the answers that end in one here gain nothing, as all of their group are alike.
    "gspo alone": {"loss_type": "grpo", "importance_sampling_level": "sequence", "mask_truncated_completions": True},
    "rloo": {"temperature": 1.5, "beta": 0.5},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.5},
    # By its own default a token counts as much as any other, as here.
    "grpo": {"beta": 0.5},
    "unscaled grpo": {"scale_rewards": "none", "beta": 0.5},
    "grpo by batch": {"scale_rewards": "batch", "beta": 0.5},
}


def train_on_answers(folder, model, config, task, arguments):
    """Train TRL's class on the prompts that a run reads."""
    return policy_runs.train_plainly(folder, model, task, read_answers(config), arguments)


# The others' losses and gradients are in test_policy_beside_trl.py.
@pytest.mark.parametrize("loss", [name if name == "gspo alone" else many(name) for name in LIKE_TRL])
def test_losses_and_weights_are_those_of_trl(single, tmp_path, policy, sums, loss):
    run, task = single(loss), LOSSES[loss][0]
    config = make_config(tmp_path / "read", policy, sums, f"task={task}", *policy_runs.COMMON)
    [plain] = run_ranks(train_on_answers, 1, tmp_path / "trl", policy, config, task, LIKE_TRL[loss], group=False)
    assert [line["reward"] for line in lines(run)] == pytest.approx([line["reward"] for line in plain])
    assert losses(run) == pytest.approx([line["loss"] for line in plain], rel=1e-5, abs=1e-6)
    assert [line["grad_norm"] for line in lines(run)] == pytest.approx([p["grad_norm"] for p in plain], rel=1e-4)
    assert trl_runs.difference(weights(run), weights(tmp_path / "trl")) < 1e-5
    kl = [line["kl"] for line in plain if "kl" in line]
    assert [line["kl"] for line in lines(run) if "kl" in line] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert len({line["grad_norm"] for line in lines(run)}) == STEPS


@pytest.mark.parametrize("strategies", [("single",), many(("single", "zero2"))])
def test_an_adapter_is_compared_with_how_it_began(tmp_path, policy, sums, cache_dir, strategies):
    """PiSSA takes what it begins with off the model's weights: without the adapter these are another model."""
    pissa = ("adapter=lora", "adapter.rank=4", "adapter.arguments.init_lora_weights=pissa", "adapter.merge=false")
    found = []
    for strategy in strategies:
        own = (*BETA, *pissa, f"strategy={strategy}")
        run = run_task(tmp_path / strategy, policy, sums, "rloo", 1 if strategy == "single" else 2, *own)
        found.append([line["kl"] for line in lines(run)])
    assert abs(found[0][0]) < 1e-6 < abs(found[0][-1])
    assert found[-1] == pytest.approx(found[0], rel=1e-3, abs=1e-6)


def test_lanes_that_end_give_no_prompts(tmp_path, policy, sums, cache_dir, monkeypatch):
    """In the last step of an epoch some rows hold nothing but filling. Rewards see the other columns of the rest.

    The rewards of the whole batch scale all of them.
    """
    install_package(tmp_path, monkeypatch, "ownrewards", policy_runs.TERMS, GROUP, terms="terms")
    ends = (
        "task.rewards={arithmetic: 2.0, terms: 1.0}",
        "task.loss=reinforce_pp",
        "task.mask_truncated=true",
        "train.max_steps=null",
        "train.epochs=1",
        "train.global_batch_size=8",
    )
    runs = [
        run_task(tmp_path / s, policy, sums, "grpo", n, *ends, f"strategy={s}") for s, n in (("single", 1), ("ddp", 2))
    ]
    for ours, theirs in zip(*(lines(run) for run in runs), strict=True):
        assert ours["reward"] == pytest.approx(theirs["reward"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["rewards/terms"] == 1.0
    assert len(lines(runs[0])) > 4
    assert read_lines(RunFolder(runs[1]).metrics)[-1]["eval_rewards/terms"] == 1.0
    assert trl_runs.difference(weights(runs[1]), weights(runs[0])) < 1e-5


@pytest.mark.parametrize(
    ("first", "then"), [("fsdp2", "single"), many("ddp", "zero3"), many("zero3", "tensor"), many("tensor", "pipeline")]
)
def test_rewards_of_steps_and_prompts_that_differ_are_the_same_in_layouts(
    tmp_path, policy, sums, cache_dir, monkeypatch, first, then
):
    """Two of the four prompts of a step train: some micro batches of a rank have none.

    The reference has moved once before the checkpoint from which the run goes on in another layout.
    """
    install_package(tmp_path, monkeypatch, "stepped", policy_runs.EVEN, GROUP, even="even")
    own = ("task.rewards={arithmetic: 2.0, even: 1.0}", "task.loss=vespo", "task.trained_prompts=2", *BETA)
    own += ("task.ref_model_sync_steps=2", "task.num_generations=2", "task.max_new_tokens=3")
    own += ("train.micro_batch_size=1", "train.eval_every=null", "data.eval_fraction=0")
    reference = run_task(tmp_path / "reference", policy, sums, "grpo", 1, *own)
    for strategy, steps in ((first, STEPS // 2), (then, STEPS)):
        layout = (f"strategy={strategy}", "checkpoint.every=2", f"train.max_steps={steps}")
        run = run_task(tmp_path / "run", policy, sums, "grpo", 1 if strategy == "single" else 2, *own, *layout)
    for ours, theirs in zip(lines(run), lines(reference), strict=True):
        assert ours["rewards/even"] == pytest.approx(theirs["rewards/even"], rel=1e-9)
        assert ours["dead_groups"] == theirs["dead_groups"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["grad_norm"] > 1e-3
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [("pipeline", 2), *(many(strategy, 2) for strategy in ("ddp", "zero3", "tensor", "fsdp2"))],
)
def test_pairs_of_own_answers_are_the_same_in_a_layout(tmp_path, policy, sums, cache_dir, strategy, num_ranks):
    own = ("task.loss=sigmoid", "task.beta=0.5", "task.nll_weight=0.1", "train.micro_batch_size=1")
    run, reference = (
        run_task(tmp_path / name, policy, sums, "online_dpo", ranks, *own, f"strategy={name}")
        for name, ranks in ((strategy, num_ranks), ("single", 1))
    )
    for ours, theirs in zip(lines(run), lines(reference), strict=True):
        for name in ("loss", "nll", "rewards/margins", "reward", "dead_groups"):
            # A step may have no pair.
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-5, abs=1e-6), name
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert eval_losses(run) == eval_losses(reference)
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5
    first, *_, last = (line["rewards/margins"] for line in lines(run) if "rewards/margins" in line)
    assert first == pytest.approx(0, abs=1e-5)
    assert abs(last) > 1e-3


def test_a_run_goes_on_in_another_layout(single, tmp_path, policy, sums):
    """It answers the same prompts with the same noise."""
    task, *own = LOSSES["gspo"]
    for strategy, steps in (("pipeline", STEPS // 2), ("ddp", STEPS)):
        layout = (f"strategy={strategy}", "checkpoint.every=2", f"train.max_steps={steps}")
        run = run_task(tmp_path, policy, sums, task, 2, *own, *layout)
    # The reference is the model of the first start.
    check_same(run, single("gspo"))
    assert [line["step"] for line in read_lines(run / "rollouts.jsonl")] == sorted(
        step for step in range(1, STEPS + 1) for _ in range(2 * policy_runs.ANSWERS)
    )


def test_answers_that_were_all_cut_off_train_nothing(tmp_path, policy, sums):
    short = ("task.max_new_tokens=1", "task.num_generations=2", "train.global_batch_size=1", "train.micro_batch_size=1")
    run = run_task(tmp_path, policy, sums, "grpo", 1, "task.loss=dapo", "task.mask_truncated=true", *short)
    cut_off = [line for line in lines(run) if line["cut_off"] == 1]
    assert {(line["loss"], line["grad_norm"]) for line in cut_off} == {(0.0, 0.0)}
