"""TRL's trainers through the mixin: as plain TRL on one process, or refused before training."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.testing import run_ranks
from tests.distributed import trl_runs
from tests.distributed.trl_runs import lora, make_dataset, make_model, train_all
from tests.marks import many

pytestmark = pytest.mark.distributed

SFT = {
    "text": {"data": "text", "arguments": {"gradient_checkpointing": True}},
    "prompt": {"data": "prompt"},
    "chat": {"data": "chat", "arguments": {"assistant_only_loss": True}},
    # 15 rows: the second step has 7, which two ranks cannot share evenly.
    "packed": {"data": "text", "arguments": {"packing": True}},
    "flat": {"data": "text", "arguments": {"padding_free": True, "max_length": None, "loss_type": "dft"}},
    "sft_adapter": {"data": "text", "more": lora()},
}
DPO = {"trainer": "dpo", "data": "preference", "arguments": {"gradient_checkpointing": True}}
KTO = {"trainer": "kto", "data": "judged", "micro_batch_size": 2, "arguments": {"loss_type": "apo_zero_unpaired"}}
REWARD = {"trainer": "reward", "data": "preference"}
PREFERENCES = {
    "dpo": DPO,
    "kto": KTO,
    "reward": REWARD,
    "dpo_adapter": DPO | {"more": lora()},
    "kto_adapter": KTO | {"more": lora()},
    # With it, PEFT trains the score besides.
    "reward_adapter": REWARD | {"more": lora(task_type="SEQ_CLS")},
}
USUAL = ("prompt", "chat", "flat", "sft_adapter", "dpo", "kto", "dpo_adapter", "reward_adapter")
"""Of the others the cases of `make matrices` are compared."""
ZERO1, ZERO2, ZERO3, FSDP2 = ({"sharding": name} for name in ("zero1", "zero2", "zero3", "fsdp2"))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    trl_runs.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory, start):
    """What plain TRL logs and becomes on one process: what it has logged of the runs that are asked for, and a folder.

    The first time, all that most tests ask for are made in one process.
    """
    folder, logged = tmp_path_factory.mktemp("plain"), {}

    def logged_of(names):
        missing = {name: (SFT | PREFERENCES)[name] for name in sorted({*names, *USUAL} - logged.keys())}
        if missing:
            logged.update(run_ranks(train_all, 1, folder, start, missing, group=False)[0])
        return {name: logged[name] for name in names}, folder

    return logged_of


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
    references, plain_folder = plain(logged)
    for run, (steps, held_out) in logged.items():
        reference, reference_held_out = references[run]
        for ours, theirs in zip(steps, reference, strict=True):
            assert pick(ours, names) == pytest.approx(pick(theirs, names), rel=1e-5, abs=1e-7), run
        assert held_out["eval_loss"] == pytest.approx(reference_held_out["eval_loss"], rel=1e-5), run
        assert trl_runs.difference(trl_runs.weights(folder / run), trl_runs.weights(plain_folder / run)) < 1e-5, run


# An adapter in a pipeline, and under ZeRO-3, is compared where a run goes on, below.
@pytest.mark.parametrize(
    "layouts",
    [
        {"prompt": {"pipeline": 2, "schedule": "zbv"}, "flat": {"pipeline": 2}},
        many({"text": {"pipeline": 2, "schedule": "gpipe"}, "chat": {"pipeline": 2, "schedule": "interleaved_1f1b"}}),
        many({"sft_adapter": {"pipeline": 2}}),
    ],
)
def test_sft_in_pipelines(tmp_path, start, plain, layouts):
    # A model by its name, as TRL takes one.
    logged = in_layout(tmp_path, start, layouts, model=str(start / "lm"))
    # The same micro batches as on one process, so TRL's own means over them are the same too.
    metrics = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy")
    check_equal(logged, tmp_path, plain, metrics)
    for name, (steps, held_out) in logged.items():
        assert steps[-1]["num_tokens"] == plain([name])[0][name][0][-1]["num_tokens"]
        for metric in ("eval_entropy", "eval_mean_token_accuracy"):
            assert 0 < held_out[metric] < 4
    for name in layouts.keys() - {"sft_adapter"}:
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert torch.isfinite(opened(torch.tensor([[5, 6]])).logits).all()


@pytest.mark.many  # stages are above, and what data ranks share below
def test_sft_in_replicated_pipelines(tmp_path, start, plain):
    check_equal(in_layout(tmp_path, start, {"packed": {"pipeline": 2, **ZERO1}}, num_ranks=4), tmp_path, plain)


@pytest.mark.parametrize(
    "layouts", [{"flat": ZERO2}, many({"packed": {}, "text": ZERO1, "sft_adapter": ZERO3, "chat": ZERO3})]
)
def test_sft_with_sharded_state(tmp_path, start, plain, layouts):
    check_equal(in_layout(tmp_path, start, layouts), tmp_path, plain)


def check_preferences(logged, folder, plain):
    # Evaluation is TRL's own: 7 rows over two ranks are 8.
    references, _ = plain(logged)
    for name, (_, held_out) in logged.items():
        assert held_out.pop("eval_loss") == pytest.approx(references[name][1]["eval_loss"], rel=0.05)
        held_out["eval_loss"] = references[name][1]["eval_loss"]
    rewards = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "num_tokens")
    of_dpo = {name: run for name, run in logged.items() if "dpo" in name}
    check_equal(of_dpo, folder, plain, ("loss", "grad_norm", *rewards))
    check_equal(logged, folder, plain)


# DPO under ZeRO-3 is in test_reference_models, too.
@pytest.mark.parametrize(
    "layouts",
    [
        {"kto": {}, "reward_adapter": FSDP2, "dpo_adapter": ZERO1},
        many({"reward": ZERO1, "reward_adapter": ZERO2, "dpo": ZERO3, "kto_adapter": ZERO3}),
    ],
)
def test_preferences_and_rewards(tmp_path, start, plain, layouts):
    check_preferences(in_layout(tmp_path, start, layouts), tmp_path, plain)


@pytest.mark.parametrize("name", map(many, ["text", "sft_adapter"]))
def test_sft_with_fsdp2(tmp_path, start, plain, name):
    check_equal(in_layout(tmp_path, start, {name: FSDP2}), tmp_path, plain)


@pytest.mark.parametrize("names", [many(("dpo", "reward_adapter")), many(("kto", "reward"))])
def test_preferences_and_rewards_with_fsdp2(tmp_path, start, plain, names):
    check_preferences(in_layout(tmp_path, start, dict.fromkeys(names, FSDP2)), tmp_path, plain)


def make_mixtral():
    torch.manual_seed(0)
    fields = {"num_local_experts": 4, "router_aux_loss_coef": 0.1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields | trl_runs.TINY))


def test_the_loss_over_routers_is_that_of_a_whole_batch(tmp_path, start):
    """SFTTrainer switches it on by itself."""
    run = SFT["text"] | {"model": make_mixtral()}
    whole = {"moe": run | {"micro_batch_size": trl_runs.GLOBAL_BATCH}}
    [plain] = run_ranks(train_all, 1, tmp_path / "plain", start, whole, group=False)
    runs = {"data": run | {"layout": {}}, "stages": run | {"model": make_mixtral(), "layout": {"pipeline": 2}}}
    for ours in run_ranks(train_all, 2, tmp_path, start, runs):
        for name in runs:
            for line, reference in zip(ours[name][0], plain["moe"][0], strict=True):
                assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5), name
                assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5), name
                assert line["router_aux_loss"] == pytest.approx(reference["aux_loss"], rel=1e-5), name


def references(folder, start):
    """DPO with a reference model of one's own, and with its log-probabilities computed beforehand."""
    given = DPO | {"layout": ZERO3, "more": {"ref_model": make_model(start)}, "arguments": {"max_steps": 2}}
    on_disk = {part: str(folder / "rows" / part) for part in ("train", "eval")}
    arguments = {"precompute_ref_log_probs": True, "max_steps": 2}
    beforehand = DPO | {"layout": ZERO3, "on_disk": on_disk, "arguments": arguments}
    return train_all(folder, start, {"given": given, "beforehand": beforehand})


def test_reference_models(tmp_path, start, plain):
    for part, num_rows in (("train", 24), ("eval", 7)):
        make_dataset("preference", num_rows).save_to_disk(str(tmp_path / "rows" / part))
    expected = plain(["dpo"])[0]["dpo"][0][:2]
    for steps, _ in run_ranks(references, 2, tmp_path, start)[0].values():
        for ours, theirs in zip(steps, expected, strict=True):
            names = ("loss", "grad_norm", "rewards/margins")
            assert pick(ours, names) == pytest.approx(pick(theirs, names), rel=1e-5, abs=1e-7)


def draw(folder, start, layout, names=("grpo", "rloo")):
    runs = {
        "grpo": {"trainer": "grpo"},
        "rloo": {"trainer": "rloo"},
        "grpo_adapter": {"trainer": "grpo", "more": lora()},
        "grpo_adapter_and_reference": {"trainer": "grpo", "beta": 0.1, "more": lora()},
        "rloo_adapter": {"trainer": "rloo", "more": lora()},
    }
    of_all = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    logged = {}
    for name in names:
        run = runs[name]
        arguments = of_all | ({"beta": run["beta"]} if "beta" in run else {})
        more = {"reward_funcs": trl_runs.count_letters} | run.get("more", {})
        run = run | {"data": "asked", "micro_batch_size": 2, "more": more, "arguments": arguments, "layout": layout}
        logged |= train_all(folder, start, {name: run})
    return logged


def draw_in_layouts(folder, start, of_fsdp2, of_zero3):
    # One process keeps what ZeRO-3 sets for all models, so it comes last.
    names = sorted({*of_fsdp2, *of_zero3})
    choices = {"ddp": ({}, names), "fsdp2": (FSDP2, of_fsdp2), "zero3": (ZERO3, of_zero3)}
    return [draw(folder / name, start, layout, some) for name, (layout, some) in choices.items()]


def check_drawn_alike(ours, theirs):
    names = ("loss", "grad_norm", "reward", "kl", "num_tokens")
    for run, (steps, _) in theirs.items():
        for line, reference in zip(ours[run][0], steps, strict=True):
            assert pick(line, names) == pytest.approx(pick(reference, names), rel=1e-4, abs=1e-6), run
        assert [line["num_tokens"] for line in steps] == sorted(line["num_tokens"] for line in steps)


@pytest.mark.parametrize(
    ("of_fsdp2", "of_zero3"),
    [
        (("rloo",), ("grpo_adapter_and_reference",)),
        many(("grpo", "grpo_adapter"), ("rloo", "grpo", "grpo_adapter", "rloo_adapter")),
    ],
)
def test_what_is_drawn_depends_on_the_number_of_processes_alone(tmp_path, start, of_fsdp2, of_zero3):
    first, *sharded = run_ranks(draw_in_layouts, 2, tmp_path, start, of_fsdp2, of_zero3)[0]
    for names, ours in zip((of_fsdp2, of_zero3), sharded, strict=True):
        check_drawn_alike(ours, {name: first[name] for name in names})


@pytest.mark.parametrize("names", [("grpo_adapter_and_reference",), many(("grpo_adapter", "rloo_adapter"))])
def test_an_adapter_is_rewarded_as_in_plain_trl(tmp_path, start, names):
    [plain] = run_ranks(draw, 1, tmp_path / "plain", start, None, names, group=False)
    [ours] = run_ranks(draw, 1, tmp_path / "ours", start, {}, names)
    check_drawn_alike(ours, plain)
    for name in names:
        assert trl_runs.difference(*(trl_runs.weights(tmp_path / of / name) for of in ("ours", "plain"))) < 1e-5


def test_a_run_goes_on_in_another_layout(tmp_path, start, plain):
    references, plain_folder = plain(["chat"])
    saves = {"save_strategy": "steps", "save_steps": 2}
    first = SFT["chat"]["arguments"] | saves | {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2}
    layout = {"pipeline": 2, "schedule": "interleaved_1f1b"}
    run = SFT["chat"] | {"layout": layout, "arguments": first}
    logged = run_ranks(train_all, 2, tmp_path, start, {"chat": run})[0]["chat"][0]
    # An evaluation in between must neither take the metrics of the steps before it, nor lose them.
    expected = [line["entropy"] for line in references["chat"][0][:2]]
    assert logged[0]["entropy"] == pytest.approx(sum(expected) / 2, rel=1e-5)
    checkpoint = str(tmp_path / "chat" / "checkpoint-2")
    run = SFT["chat"] | {"layout": ZERO3, "resume": checkpoint}
    logged = run_ranks(train_all, 2, tmp_path / "on", start, {"chat": run})[0]
    held_out = logged["chat"][1]["eval_loss"]
    assert held_out == pytest.approx(references["chat"][1]["eval_loss"], rel=1e-5)
    for folder in (tmp_path, tmp_path / "on"):
        whole = trl_runs.weights(plain_folder / "chat")
        assert trl_runs.difference(trl_runs.weights(folder / "chat"), whole) < 1e-5


def peft_config(folder):
    fields = json.loads((folder / "adapter_config.json").read_text())
    # PEFT itself writes a set in the order of the process.
    return fields | {"target_modules": sorted(fields["target_modules"])}


@pytest.mark.parametrize(
    ("name", "first", "then"), [("sft_adapter", {"pipeline": 2}, ZERO3), many("dpo_adapter", ZERO3, {})]
)
def test_an_adapter_goes_on_in_another_layout_and_opens_in_peft(tmp_path, start, plain, name, first, then):
    run = (SFT | PREFERENCES)[name]
    saves = {"arguments": run.get("arguments", {}) | {"save_strategy": "steps", "save_steps": 2}}
    run_ranks(train_all, 2, tmp_path, start, {name: run | saves | {"layout": first}})
    going_on = run | {"layout": then, "resume": str(tmp_path / name / "checkpoint-2")}
    run_ranks(train_all, 2, tmp_path / "on", start, {name: going_on})
    folders = [folder / name / "model" for folder in (tmp_path, tmp_path / "on", plain([name])[1])]
    assert peft_config(folders[0]) == peft_config(folders[1]) == peft_config(folders[2])
    ours, gone_on, theirs = (
        PeftModel.from_pretrained(make_model(start), folder)(torch.tensor([[5, 6, 7]])).logits for folder in folders
    )
    base = make_model(start)(torch.tensor([[5, 6, 7]])).logits
    assert (theirs - base).norm() > 1e-3 * base.norm()
    for logits in (ours, gone_on):
        assert (logits - theirs).norm() < 1e-5 * theirs.norm()


PIPELINE = {"layout": {"pipeline": 2}}
REFUSED = {
    "a pipeline ends the model's forward": DPO | PIPELINE,
    "it learns a prompt": SFT["text"] | PIPELINE | {"more": {"peft_config": PromptTuningConfig(num_virtual_tokens=2)}},
    "no config of an adapter": DPO | {"layout": {}, "more": {"peft_config": {"r": 4}}},
    "PEFT refuses the adapter": DPO | {"layout": {}, "more": {"peft_config": LoraConfig(target_modules=["no_layer"])}},
    "an adapter on the head": DPO | {"layout": {}, "more": {"peft_config": LoraConfig(target_modules=["lm_head"])}},
    "the model's own weights too": DPO | {"layout": {}, "more": lora(init_lora_weights="pissa")},
    "trained tokens": SFT["text"] | PIPELINE | {"more": lora(trainable_token_indices=[3])},
    "'none'": KTO | {"layout": {}, "more": lora(bias="all")},
    "copies the adapter": DPO | {"layout": FSDP2, "more": lora()},
    "tokens that come with a template": SFT["text"]
    | {"layout": ZERO1, "more": lora(), "arguments": {"chat_template_path": "some/tokenizer"}},
    "each tensor rank has a part": SFT["text"] | {"layout": FSDP2 | {"tensor": 2}},
    "args.label_smoothing_factor": SFT["text"] | PIPELINE | {"arguments": {"label_smoothing_factor": 0.1}},
    "args.activation_offloading": SFT["text"] | PIPELINE | {"arguments": {"activation_offloading": True}},
    "compute_loss_func": SFT["text"] | PIPELINE | {"more": {"compute_loss_func": max}},
    "sees through": SFT["packed"] | PIPELINE | {"model": "mamba"},
    "a model that exists": REWARD | {"layout": {}, "model": "name"},
    "no/such-folder": SFT["text"] | PIPELINE | {"model": "no/such-folder"},
    "bf16=True by default": SFT["text"] | {"layout": ZERO1, "arguments": {"bf16": True}},
    "rank 0 writes": DPO | {"layout": {}, "arguments": {"precompute_ref_log_probs": True}},
    # transformers says nothing of unexpected names in ZeRO-3. It comes last, since a process keeps what ZeRO-3 sets.
    "unexpected: 1 (score.weight)": SFT["text"] | {"layout": ZERO3, "model": "scores"},
}


def ask(folder, start):
    said = {}
    models = {
        "mamba": lambda: AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=20),
    }
    for message, run in REFUSED.items():
        trl_runs.forget_parent()
        if run.get("model") == "scores":
            run = run | {"model": str(start / "scores")}
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
