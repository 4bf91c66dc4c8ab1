"""TRL's trainers through the mixin: as plain TRL on one process, or refused before training."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.testing import run_ranks
from tests.distributed import trl_runs
from tests.distributed.trl_runs import make_dataset, make_model, train_all

pytestmark = pytest.mark.distributed

SFT = {
    "text": {"data": "text"},
    "prompt": {"data": "prompt"},
    "chat": {"data": "chat", "arguments": {"assistant_only_loss": True}},
    # 15 rows: the second step has 7, which two ranks cannot share evenly.
    "packed": {"data": "text", "arguments": {"packing": True}},
    "flat": {"data": "text", "arguments": {"padding_free": True, "max_length": None, "loss_type": "dft"}},
    "adapters": {"data": "text", "adapters": True},
}
DPO = {"trainer": "dpo", "data": "preference"}
KTO = {"trainer": "kto", "data": "judged", "micro_batch_size": 2, "arguments": {"loss_type": "apo_zero_unpaired"}}
REWARD = {"trainer": "reward", "data": "preference"}
PREFERENCES = {"dpo": DPO, "kto": KTO, "reward": REWARD}
ZERO1, ZERO2, ZERO3 = ({"sharding": f"zero{stage}"} for stage in (1, 2, 3))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    trl_runs.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory, start):
    """What plain TRL logs and becomes on one process."""
    folder = tmp_path_factory.mktemp("plain")
    return run_ranks(train_all, 1, folder, start, SFT | PREFERENCES, group=False)[0], folder


def in_layout(folder, start, layouts, num_ranks=2, **more):
    """Train runs of SFT or PREFERENCES in the layout given for each; all ranks must have logged the same."""
    runs = {name: (SFT | PREFERENCES)[name] | {"layout": layout} | more for name, layout in layouts.items()}
    logged = run_ranks(train_all, num_ranks, folder, start, runs, timeout_seconds=280)
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss")
    for other in logged[1:]:
        for name in runs:
            assert [pick(line, names) for line in other[name][0]] == [pick(line, names) for line in logged[0][name][0]]
    return logged[0]


def pick(line, names):
    return {name: line[name] for name in names if name in line}


def check_equal(logged, folder, plain, names=("loss", "grad_norm", "learning_rate")):
    for run, (steps, held_out) in logged.items():
        reference, reference_held_out = plain[0][run]
        for ours, theirs in zip(steps, reference, strict=True):
            assert pick(ours, names) == pytest.approx(pick(theirs, names), rel=1e-5, abs=1e-7), run
        assert held_out["eval_loss"] == pytest.approx(reference_held_out["eval_loss"], rel=1e-5), run
        if run != "adapters":  # whose folder holds what this class makes of them
            assert trl_runs.difference(trl_runs.weights(folder / run), trl_runs.weights(plain[1] / run)) < 1e-5, run


def test_sft_in_pipelines(tmp_path, start, plain):
    layouts = {
        "text": {"pipeline": 2, "schedule": "gpipe"},
        "prompt": {"pipeline": 2, "schedule": "zbv"},
        "chat": {"pipeline": 2, "schedule": "interleaved_1f1b"},
        "packed": {"pipeline": 2},
        "flat": {"pipeline": 2},
        "adapters": {"pipeline": 2},
    }
    logged = in_layout(tmp_path, start, layouts)
    # The same micro batches as on one process, so TRL's own means over them are the same too.
    metrics = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy")
    check_equal(logged, tmp_path, plain, metrics)
    assert logged["text"][0][-1]["num_tokens"] == plain[0]["text"][0][-1]["num_tokens"]
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert 0 < logged["prompt"][1][name] < 4
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "text" / "model")
    assert torch.isfinite(opened(torch.tensor([[5, 6]])).logits).all()


def test_sft_in_replicated_pipelines_with_a_model_by_name(tmp_path, start, plain):
    layouts = {"packed": {"pipeline": 2, **ZERO1}}
    check_equal(in_layout(tmp_path, start, layouts, num_ranks=4, model=str(start / "lm")), tmp_path, plain)


def test_sft_with_sharded_state(tmp_path, start, plain):
    layouts = {"text": ZERO1, "chat": ZERO3, "packed": {}, "flat": ZERO2}
    check_equal(in_layout(tmp_path, start, layouts), tmp_path, plain)


def test_preferences_and_rewards(tmp_path, start, plain):
    logged = in_layout(tmp_path, start, {"dpo": ZERO3, "kto": {}, "reward": ZERO1})
    # Evaluation is TRL's own: 7 rows over two ranks are 8.
    for name, (_, held_out) in logged.items():
        assert held_out.pop("eval_loss") == pytest.approx(plain[0][name][1]["eval_loss"], rel=0.05)
        held_out["eval_loss"] = plain[0][name][1]["eval_loss"]
    rewards = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "num_tokens")
    check_equal({"dpo": logged["dpo"]}, tmp_path, plain, ("loss", "grad_norm", *rewards))
    check_equal(logged, tmp_path, plain)


def make_mixtral():
    torch.manual_seed(0)
    fields = {"num_local_experts": 4, "router_aux_loss_coef": 0.1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields | trl_runs.TINY))


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}])
def test_the_loss_over_routers_is_that_of_a_whole_batch(tmp_path, start, layout):
    """SFTTrainer switches it on by itself."""
    run = SFT["text"] | {"model": make_mixtral()}
    whole = {"moe": run | {"micro_batch_size": trl_runs.GLOBAL_BATCH}}
    [plain] = run_ranks(train_all, 1, tmp_path / "plain", start, whole, group=False)
    for ours in run_ranks(train_all, 2, tmp_path, start, {"moe": run | {"layout": layout}}):
        for line, reference in zip(ours["moe"][0], plain["moe"][0], strict=True):
            assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
            assert line["router_aux_loss"] == pytest.approx(reference["aux_loss"], rel=1e-5)


def references(folder, start):
    """DPO with a reference model of one's own, and with its log-probabilities computed beforehand."""
    given = DPO | {"layout": ZERO3, "more": {"ref_model": make_model(start)}}
    on_disk = {part: str(folder / "rows" / part) for part in ("train", "eval")}
    beforehand = DPO | {"layout": ZERO3, "on_disk": on_disk, "arguments": {"precompute_ref_log_probs": True}}
    return train_all(folder, start, {"given": given, "beforehand": beforehand})


def test_reference_models(tmp_path, start, plain):
    for part, num_rows in (("train", 24), ("eval", 7)):
        make_dataset("preference", num_rows).save_to_disk(str(tmp_path / "rows" / part))
    for steps, _ in run_ranks(references, 2, tmp_path, start)[0].values():
        for ours, theirs in zip(steps, plain[0]["dpo"][0], strict=True):
            names = ("loss", "grad_norm", "rewards/margins")
            assert pick(ours, names) == pytest.approx(pick(theirs, names), rel=1e-5, abs=1e-7)


def draw(folder, start, layout):
    more = {"reward_funcs": trl_runs.count_letters}
    arguments = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    run = {"trainer": "grpo", "data": "asked", "micro_batch_size": 2, "more": more, "arguments": arguments}
    return train_all(folder, start, {"grpo": run | {"layout": layout}})["grpo"]


def test_what_is_drawn_depends_on_the_number_of_processes_alone(tmp_path, start):
    (first, _), (second, _) = (
        run_ranks(draw, 2, tmp_path / name, start, layout)[0] for name, layout in (("ddp", {}), ("zero3", ZERO3))
    )
    names = ("loss", "grad_norm", "reward", "num_tokens")
    for ours, theirs in zip(second, first, strict=True):
        assert pick(ours, names) == pytest.approx(pick(theirs, names), rel=1e-4, abs=1e-6)
    assert [line["num_tokens"] for line in first] == sorted(line["num_tokens"] for line in first)


def test_a_run_goes_on_in_another_layout(tmp_path, start, plain):
    saves = {"save_strategy": "steps", "save_steps": 2}
    first = SFT["chat"]["arguments"] | saves | {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2}
    run = SFT["chat"] | {"layout": {"pipeline": 2}, "arguments": first}
    logged = run_ranks(train_all, 2, tmp_path, start, {"chat": run})[0]["chat"][0]
    # An evaluation in between must neither take the metrics of the steps before it, nor lose them.
    expected = [line["entropy"] for line in plain[0]["chat"][0][:2]]
    assert logged[0]["entropy"] == pytest.approx(sum(expected) / 2, rel=1e-5)
    checkpoint = str(tmp_path / "chat" / "checkpoint-2")
    run = SFT["chat"] | {"layout": ZERO3, "resume": checkpoint}
    logged = run_ranks(train_all, 2, tmp_path / "on", start, {"chat": run})[0]
    held_out = logged["chat"][1]["eval_loss"]
    assert held_out == pytest.approx(plain[0]["chat"][1]["eval_loss"], rel=1e-5)
    assert trl_runs.difference(trl_runs.weights(tmp_path / "on" / "chat"), trl_runs.weights(plain[1] / "chat")) < 1e-5


PIPELINE = {"layout": {"pipeline": 2}}
REFUSED = {
    "a pipeline ends the model's forward": DPO | PIPELINE,
    "adapters must be in the model": SFT["text"] | PIPELINE | {"more": {"peft_config": LoraConfig()}},
    "each tensor rank has a part": SFT["text"] | {"layout": {"sharding": "fsdp2", "tensor": 2}},
    "args.label_smoothing_factor": SFT["text"] | PIPELINE | {"arguments": {"label_smoothing_factor": 0.1}},
    "args.activation_offloading": SFT["text"] | PIPELINE | {"arguments": {"activation_offloading": True}},
    "compute_loss_func": SFT["text"] | PIPELINE | {"more": {"compute_loss_func": max}},
    "sees through": SFT["packed"] | PIPELINE | {"model": "mamba"},
    "a model that exists": REWARD | {"layout": {}, "model": "name"},
    "no/such-folder": SFT["text"] | PIPELINE | {"model": "no/such-folder"},
    "bf16=True by default": SFT["text"] | {"layout": ZERO1, "arguments": {"bf16": True}},
    "rank 0 writes": DPO | {"layout": {}, "arguments": {"precompute_ref_log_probs": True}},
}


def ask(folder, start):
    said = {}
    models = {
        "mamba": lambda: AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=20),
    }
    for message, run in REFUSED.items():
        trl_runs.forget_parent()
        if run.get("model") in models:
            run = run | {"model": AutoModelForCausalLM.from_config(models[run["model"]]())}
        with pytest.raises(ConfigError) as refused:
            trl_runs.make_trainer(folder, start, run)
        said[message] = str(refused.value)
    return said


def test_what_is_refused(tmp_path, start):
    for answers in run_ranks(ask, 2, tmp_path, start):
        for message, said in answers.items():
            assert message in said
            assert "try:" in said
