"""Any optimizer in every layout, the user's own or by name: as on one process, saved and resumed, or refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ExponentialLR
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError
from hfdist.models.initialize import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.optim.registry import GROUP
from hfdist.testing import run_ranks
from tests.distributed import trainers
from tests.distributed.runs import losses, pretrain, weights
from tests.distributed.trainers import STEPS, make_model, make_strategy, on_ranks
from tests.marks import many
from tests.packages import install_package
from tests.unit.test_optim import PLUGIN

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "single": (1, {}),
    "rounded": (1, {}),
    "ddp": (2, {}),
    "zero1": (2, {"sharding": "zero1"}),
    "zero2": (2, {"sharding": "zero2"}),
    "zero3": (2, {"sharding": "zero3"}),
    "fsdp2": (2, {"sharding": "fsdp2"}),
    "hsdp": (4, {"sharding": "fsdp2", "replicate": 2}),
    "fsdp2 in a pipeline": (4, {"sharding": "fsdp2", "pipeline": 2}),
    "tensor": (2, {"tensor": 2}),
    "fsdp2 and tensor": (4, {"sharding": "fsdp2", "tensor": 2}),
    "tensor in a pipeline": (4, {"tensor": 2, "pipeline": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "pipeline_zero1": (4, {"pipeline": 2, "sharding": "zero1"}),
    "experts": (2, {"expert": 2}),
    "fsdp2 and experts": (4, {"sharding": "fsdp2", "expert": 2}),
    "offload": (2, {"sharding": "zero2", "offload": "cpu"}),
}
MIDDLE = 2


def two_groups(model):
    """Of different rates, and not in the model's order."""
    second = [p for name, p in model.named_parameters() if "norm" in name or "embed" in name]
    first = [p for name, p in model.named_parameters() if "norm" not in name and "embed" not in name]
    return [{"params": first[::-1]}, {"params": second, "lr": 1e-2}]


def stepped_before(model):
    """An optimizer that has a state when it is given to the Trainer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3 * (number + 1))
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return {"optimizers": (optimizer, None)}


def with_a_schedule(model):
    optimizer = torch.optim.SGD(two_groups(model), lr=0.1, momentum=0.9, dampening=0.1)
    return {"optimizers": (optimizer, ExponentialLR(optimizer, 0.5))}


class ScheduleFree(torch.optim.Optimizer):
    """SGD that averages: it trains at other weights than those to be used, and counts in its groups."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": False})

    @torch.no_grad()
    def set_mode(self, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                share = 1 - group["beta"] if mode else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], share)
                group["train_mode"] = mode

    def train(self):
        self.set_mode(True)

    def eval(self):
        self.set_mode(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"] if group["weight_sum"] else 0.0
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, share)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


def schedule_free(model):
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_type": "constant"}
    return {"optimizers": (ScheduleFree(two_groups(model), lr=0.1), None), "arguments": evaluating}


class MakesItsOwn(hfdist.Trainer):
    """Gives nothing back, which the original Trainer does not mind."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.Adagrad(two_groups(self.model), lr=0.01, initial_accumulator_value=0.1)


def own(kind, **settings):
    return lambda model: {"optimizers": (kind(two_groups(model), **settings), None)}


CASES = {
    "keeps nothing, given by class": lambda model: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    "momentum and a schedule of one's own": with_a_schedule,
    "keeps a number in its state": own(torch.optim.NAdam, lr=0.01, eps=1e-4),
    "keeps a state from its construction on, made by a subclass": lambda model: {"kind": MakesItsOwn},
    "schedule-free": schedule_free,
    "stepped before": stepped_before,
}
"""Each keeps another kind of state, and comes to the Trainer in another way."""
OF_WHOLE_MATRICES = {
    "Muon": lambda model: {"optimizer_cls_and_kwargs": (hfdist.MuonWithAdamW, {"lr": 1e-2, "eps": 1e-4})},
    "Adafactor": lambda model: {"arguments": {"optim": "adafactor", "learning_rate": 1e-2}},
}
EVERY = CASES | OF_WHOLE_MATRICES
STACKS = "Muon, of experts"


def make_trainer(folder, layout, make, make_model=make_model, **more):
    # So that the model is whole at first, also where another run has gone before.
    unset_hf_deepspeed_config()
    model = make_model()
    named = make(model)
    arguments = {"save_strategy": "steps", "save_steps": MIDDLE, "learning_rate": 5e-5} | more
    arguments |= named.pop("arguments", {})
    strategy = make_strategy(micro_batch_size=2, **LAYOUTS[layout][1])
    return trainers.make_trainer(folder, strategy, model=model, arguments=arguments, **named)


def train_all(folder, layout, names, reference):
    """Train each to the end, and once more from the middle of a run of one process, if there is one."""
    result = {}
    for name in names:
        make, model = (OF_WHOLE_MATRICES["Muon"], make_mixture) if name == STACKS else (EVERY[name], make_model)
        trainer = make_trainer(folder / layout / name, layout, make, model)
        trainer.train()
        result[name] = [
            value
            for entry in trainer.state.log_history
            for key, value in entry.items()
            if key in ("loss", "grad_norm", "eval_loss")
        ]
        if reference is not None:
            resumed = make_trainer(folder / layout / f"{name} resumed", layout, make, model)
            resumed.train(resume_from_checkpoint=str(reference / name / f"checkpoint-{MIDDLE}"))
    return result


def saved(folder, step=STEPS):
    """Weights and the optimizer's tensors and numbers, by name."""
    path = folder / f"checkpoint-{step}"
    tensors = {}
    for file in [*path.glob("model*.safetensors"), *path.glob("training_state/optimizer-*.safetensors")]:
        tensors |= load_file(file)
    state = json.loads((path / "training_state" / "state.json").read_text())
    for key, by_name in ({"step": state["steps"]} | state.get("numbers", {})).items():
        tensors |= {f"{name}/{key}": torch.tensor(float(value)) for name, value in by_name.items()}
    return tensors


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process has logged of those that are asked for, and its folder: `make test` asks for `CHOSEN`."""
    folder, logged = tmp_path_factory.mktemp("optimizers"), {}

    def logged_of(names):
        if missing := [name for name in EVERY if name in {*names, *CHOSEN_NAMES} - logged.keys()]:
            logged.update(run_ranks(train_all, 1, folder, "single", missing, None, group=False)[0])
        return folder, logged

    return logged_of


def assert_same(what, ours, expected, bound=None):
    assert ours.keys() == expected.keys(), what
    # Muon makes matrices orthogonal in bfloat16, which enlarges differences of rounding, on some CPUs more than on
    # others; its steps are 1e-2 long. Without rounding they are compared below.
    bound = bound or (1e-3 if what.startswith("Muon") else 1e-5)
    for name, tensor in expected.items():
        difference = float((ours[name].double() - tensor.double()).abs().max())
        assert difference <= bound * max(1.0, float(tensor.abs().max())), f"{what}: {name}: {difference}"


PLAIN = "keeps nothing, given by class"
NUMBER = "keeps a number in its state"
SCHEDULE = "momentum and a schedule of one's own"
FROM_THE_START = "keeps a state from its construction on, made by a subclass"
# Every kind of state in one of these three; with MORE, every layout has those that it could get wrong. Matrices that
# are whole for a step are below, and in test_numerics.py.
CHOSEN = [
    ("zero3", [NUMBER, FROM_THE_START]),
    ("fsdp2", ["schedule-free"]),
    ("pipeline", [SCHEDULE, "stepped before"]),
]
CHOSEN_NAMES = {name for _, names in CHOSEN for name in names}
MORE = [
    ("ddp", ["schedule-free", *OF_WHOLE_MATRICES]),
    ("zero1", [PLAIN, "schedule-free", *OF_WHOLE_MATRICES]),
    ("zero2", [SCHEDULE, FROM_THE_START, *OF_WHOLE_MATRICES]),
    ("zero3", ["stepped before", SCHEDULE, *OF_WHOLE_MATRICES]),
    ("fsdp2", [SCHEDULE, FROM_THE_START, "stepped before", *OF_WHOLE_MATRICES]),
    ("tensor", [NUMBER, "Adafactor"]),
    ("fsdp2 and tensor", ["Adafactor"]),
    ("pipeline", [PLAIN, NUMBER, "Adafactor", "Muon"]),
    ("pipeline_zero1", [SCHEDULE, FROM_THE_START, *OF_WHOLE_MATRICES]),
]


@pytest.mark.parametrize(("layout", "names"), [*CHOSEN, *(many(*one) for one in MORE)])
def test_optimizers_train_and_resume_as_on_one_process(reference, layout, names):
    folder, expected = reference(names)
    found = run_ranks(train_all, LAYOUTS[layout][0], folder, layout, names, folder / "single")[0]
    for name in names:
        at_end = saved(folder / "single" / name)
        assert_same(name, saved(folder / layout / name), at_end)
        assert_same(f"{name}, resumed", saved(folder / layout / f"{name} resumed"), at_end)
        assert torch.tensor(found[name]) == pytest.approx(torch.tensor(expected[name]), rel=1e-4), name


def orthogonal(matrices, coefficients, num_steps, eps):
    """Muon's iteration without its rounding to bfloat16."""
    a, b, c = coefficients
    found = matrices.double()
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.to(matrices.dtype)


def make_mixture():
    """Of matrices, and of stacks of them: of 32 experts, some get no token."""
    shape = trainers.TINY | {"moe_intermediate_size": 24, "num_experts": 32, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **shape, decoder_sparse_step=1))
    initialize_by_name(model, 0, make_strategy("zero3") if is_deepspeed_zero3_enabled() else Partitioning())
    return model


MEAN = "gate_up_proj/momentum_buffer"


@pytest.fixture(scope="module")
def without_rounding(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hfdist.optim.muon.orthogonalize", orthogonal)
        found = run_ranks(train_all, 1, folder, "single", [STACKS], None, group=False)[0]
    return folder, found[STACKS]


@pytest.mark.parametrize(
    "layout",
    [
        "zero2",
        "experts",
        *map(many, ["ddp", "zero1", "zero3", "pipeline_zero1", "offload", "hsdp", "fsdp2 in a pipeline"]),
        *map(many, ["fsdp2 and experts", "fsdp2 and tensor", "tensor in a pipeline"]),
    ],
)
def test_muon_differs_by_its_rounding_alone(without_rounding, monkeypatch, layout):
    folder, expected = without_rounding
    monkeypatch.setattr("hfdist.optim.muon.orthogonalize", orthogonal)
    found = run_ranks(train_all, LAYOUTS[layout][0], folder, layout, [STACKS], folder / "single")[0]
    assert torch.tensor(found[STACKS]) == pytest.approx(torch.tensor(expected), rel=1e-5)
    at_end = saved(folder / "single" / STACKS)
    for name in (STACKS, f"{STACKS} resumed"):
        assert_same("without rounding", saved(folder / layout / name), at_end, bound=1e-6)


def test_rounding_of_muon_is_larger_than_what_layouts_may_differ_by(without_rounding):
    folder, _ = without_rounding
    run_ranks(train_all, 1, folder, "rounded", [STACKS], None, group=False)
    at_end = saved(folder / "single" / STACKS)
    with pytest.raises(AssertionError, match="without rounding"):
        assert_same("without rounding", saved(folder / "rounded" / STACKS), at_end, bound=1e-6)
    # In the first two steps some experts had no token: all zeros, and no update. Then they had, and others had none.
    means = [value for name, value in saved(folder / "single" / STACKS, MIDDLE).items() if name.endswith(MEAN)]
    idle = [sum(not of_expert.any() for of_expert in mean) for mean in means]
    assert len(means) == 2
    assert all(0 < number < 32 for number in idle), idle


@pytest.mark.many
@pytest.mark.parametrize("layout", ["fsdp2", "tensor"])
def test_gradients_are_unscaled_before_they_are_gathered(tmp_path, monkeypatch, layout):
    monkeypatch.setitem(EVERY, "fp16", lambda model: EVERY["Muon"](model) | {"arguments": {"fp16": True}})
    for name in ("single", layout):
        monkeypatch.setitem(LAYOUTS, name, (LAYOUTS[name][0], LAYOUTS[name][1] | {"precision": "fp16"}))
    ours, alone = (
        run_ranks(train_all, LAYOUTS[name][0], tmp_path, name, ["fp16"], None)[0] for name in (layout, "single")
    )
    assert torch.tensor(ours["fp16"]) == pytest.approx(torch.tensor(alone["fp16"]), rel=1e-4)


@on_ranks(1, group=False)
def test_what_a_layout_would_train_otherwise_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="which changes k, train_mode, weight_sum of its groups"):
        make_trainer(tmp_path, "zero3", EVERY["schedule-free"]).train()


def trained_after_a_skipped_start(folder, save_strategy):
    trainer = make_trainer(folder, "single", EVERY["keeps a number in its state"], save_strategy=save_strategy)
    first = iter([torch.nan])
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * next(first, 1.0))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if entry.get("skipped")] == [1]
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@on_ranks(1, group=False)
def test_saves_change_nothing_where_the_first_step_is_skipped(tmp_path):
    """NAdam's state does not begin at zero, and a save's memory is made after a step."""
    saving, without = (trained_after_a_skipped_start(tmp_path / name, name) for name in ("steps", "no"))
    assert all(torch.equal(value, without[name]) for name, value in saving.items())


def evaluated_with_metrics(folder, has_metrics):
    def make(model):
        return schedule_free(model) | ({"compute_metrics": lambda predictions: {}} if has_metrics else {})

    trainer = make_trainer(folder, "zero1", make, save_steps=1, max_steps=2)
    trainer.train()
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_metrics_are_of_the_weights_to_be_used_and_checkpoints_of_those_that_train(tmp_path):
    plain, with_metrics = (run_ranks(evaluated_with_metrics, 1, tmp_path / str(has), has)[0] for has in (False, True))
    assert with_metrics == pytest.approx(plain, rel=1e-5)
    ours, theirs = (saved(tmp_path / str(has), step=2) for has in (False, True))
    assert_same("with metrics", theirs, ours)


def test_an_installed_packages_optimizer_trains_and_resumes_in_another_layout(tmp_path, monkeypatch):
    install_package(tmp_path / "site", monkeypatch, "toyoptimizers", PLUGIN, GROUP, averaged="Averaged")
    config = ("optimizer.plugin=averaged", "optimizer.arguments={decay: 0.5}", "optimizer.lr=0.1", "train.max_steps=6",
              "checkpoint=default", "checkpoint.every=3", "data.workers=0", "data.eval_sequences=2")  # fmt: skip
    whole = pretrain(tmp_path / "whole", 1, "strategy=single", *config)
    assert losses(whole)[-1] < losses(whole)[0]
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    shutil.rmtree(resumed / "model")
    pretrain(resumed, 2, "strategy=zero1", *config)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    for name, weight in weights(whole).items():
        assert torch.allclose(weights(resumed)[name], weight, atol=1e-6), name
    for run in (whole, resumed):
        files = (run / "checkpoints" / "step-00000006" / "training_state").glob("optimizer-*.safetensors")
        kept = [name for file in files for name in load_file(file)]
        assert kept
        assert all(name.endswith("/mean") for name in kept)


class Thaws(TrainerCallback):
    """Unfreezes after a step what no group of the optimizer has."""

    def on_step_begin(self, args, state, control, model=None, **named):
        if state.global_step == 1:
            model.requires_grad_(True)


@on_ranks(2)
def test_what_is_thawed_after_the_optimizer_was_made_is_refused_in_each_layout(tmp_path):
    for layout in ({}, {"sharding": Sharding.fsdp2}, {"sharding": Sharding.zero2}):
        model = make_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name)
        trainer = trainers.make_trainer(tmp_path, make_strategy(**layout), model=model, callbacks=[Thaws()])
        with pytest.raises(ConfigError, match="after the optimizer was made") as refused:
            trainer.train()
        assert trainer.state.global_step == 1
        assert "layers.0.self_attn.q_proj.weight, now with requires_grad=True" in refused.value.found
