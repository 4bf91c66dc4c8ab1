"""PPO: the losses and weights of a plain program, the same in every layout and after a resume in another one."""

import pytest
from safetensors import safe_open

from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from tests.distributed import policy_runs, ppo_runs, trl_runs
from tests.distributed.preference_runs import STEPS, make_config, read_answers, tune
from tests.distributed.runs import eval_losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

OWN = ("task=ppo", *policy_runs.COMMON, *ppo_runs.KEYS)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.merge=true")
FIGURES = ("loss", "value_loss", "kl", "grad_norm", "reward")


@pytest.fixture(scope="module")
def single(tmp_path_factory, policy, sums, cache_dir):
    return tune(tmp_path_factory.mktemp("single") / "run", policy, sums, 1, *OWN)


def lines(run):
    return [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]


def check_same(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    for own, other in zip(ours, theirs, strict=True):
        for name in FIGURES:
            assert own[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


def test_losses_and_weights_are_those_of_a_plain_program(single, tmp_path, policy, sums):
    [steps] = run_ranks(read_answers, 1, make_config(tmp_path / "read", policy, sums, *OWN), group=False)
    plain = ppo_runs.train_plainly(tmp_path / "plain" / "model", policy, steps)
    check_same(lines(single), plain)
    assert trl_runs.difference(weights(single), weights(tmp_path / "plain")) < 1e-5
    assert plain[-1]["reward"] != plain[0]["reward"]
    assert abs(plain[-1]["kl"]) > 1e-3


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        *(many(one, 2) for one in ("ddp", "ddp task.generators=1 task.max_staleness=0", "zero3", "tensor")),
        many("3d train.micro_batch_size=1", 8),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, policy, sums, strategy, num_ranks):
    run = tune(tmp_path / "run", policy, sums, num_ranks, *OWN, *f"strategy={strategy}".split())
    check_same(lines(run), lines(single))
    assert eval_losses(run) == eval_losses(single)
    assert trl_runs.difference(weights(run), weights(single)) < 1e-5


def names_of_values(folder):
    """The tensors of a head of values in each file."""
    names = {path.name: list(safe_open(path, "pt").keys()) for path in sorted(folder.rglob("*.safetensors"))}
    return {file: [name for name in own if "value_head" in name] for file, own in names.items()}


@pytest.mark.parametrize(
    ("first", "then", "adapter"),
    [
        ("pipeline", "fsdp2", ()),
        many("single", "single", LORA),
        many("zero3", "pipeline", LORA),
        many("fsdp2", "zero3", ()),
    ],
)
def test_a_run_goes_on_with_its_values_in_another_layout(
    request, tmp_path, policy, sums, cache_dir, first, then, adapter
):
    """A checkpoint has them beside the optimizer's state, and the folder of the model is that of the policy alone."""
    reference = (
        tune(tmp_path / "one", policy, sums, 1, *OWN, *adapter) if adapter else request.getfixturevalue("single")
    )
    for strategy, steps in ((first, STEPS // 2), (then, STEPS)):
        layout = (f"strategy={strategy}", "checkpoint.every=2", f"train.max_steps={steps}")
        run = tune(tmp_path / "run", policy, sums, 1 if strategy == "single" else 2, *OWN, *adapter, *layout)
    check_same(lines(run), lines(reference))
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5
    found = names_of_values(RunFolder(run).model) | names_of_values(RunFolder(run).adapter)
    assert found
    assert not any(found.values())
    kept = names_of_values(run / "checkpoints" / f"step-{STEPS:08}")
    wanted = [f"value_head.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "weight")]
    assert [own for own in kept.values() if own] == [wanted]
