"""What optimizers are asked: how far an update reaches, what is kept, and one made of several."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Adafactor, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.training_args import OptimizerNames

from hfdist.config.composition.compose import compose_config
from hfdist.config.optimizer import OptimizerName
from hfdist.errors import ConfigError
from hfdist.optim.check import check, check_steps_all, describe
from hfdist.optim.joined import Joined
from hfdist.optim.muon import Muon, MuonWithAdamW
from hfdist.optim.probe import (
    Reach,
    groups_of_wholes,
    ignores_gradient_size,
    moving_options,
    probe_optimizer,
    starts_from_zeros,
)
from hfdist.optim.registry import GROUP, check_optimizer, find_optimizer, stepped_whole, values_per_weight
from hfdist.strategies.optimizer_state import StateReader
from hfdist.strategies.pieces import list_pieces
from hfdist.trainer.optimizers import OwnOptimizer
from tests.packages import install_package


class TrustRatio(torch.optim.SGD):
    """LAMB's and LARS's scaling by norms of a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        return super().step(closure)


class TrustRatioWhereDecayed(torch.optim.SGD):
    """LAMB's in other libraries: no scaling of what has no decay."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"] if group["weight_decay"] else ():
                parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        return super().step(closure)


class ClipsAll(torch.optim.SGD):
    """One norm over all parameters."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise, and counts in a number of numpy's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = np.float64(state.get("count", 0.0) + 1)
                parameter.sub_(parameter.grad + 1e-6 * torch.randn_like(parameter), alpha=group["lr"])


class CountsBeside(torch.optim.SGD):
    """Keeps a number beside the states of parameters."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Steps another, whatever its own groups are."""

    def __init__(self, inner):
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


class Counts(torch.optim.SGD):
    """Keeps a number in its groups, and a list for each parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.param_groups[0]["steps"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                self.state[parameter].setdefault("seen", []).append(1)
        return super().step(closure)


def parameters():
    return [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))]


REACH = {
    "SGD": (lambda: torch.optim.SGD(parameters(), momentum=0.9, dampening=0.1), Reach.element, ""),
    "AdamW": (lambda: torch.optim.AdamW(parameters()), Reach.element, ""),
    "fused": (lambda: torch.optim.AdamW(parameters(), fused=True), Reach.element, ""),
    "Adagrad": (lambda: torch.optim.Adagrad(parameters(), initial_accumulator_value=0.1), Reach.element, ""),
    "Rprop": (lambda: torch.optim.Rprop(parameters()), Reach.element, ""),
    "Adafactor": (lambda: Adafactor(parameters()), Reach.parameter, "rest of its parameter"),
    "torch's Adafactor": (lambda: torch.optim.Adafactor(parameters()), Reach.parameter, "rest of its parameter"),
    "trust ratio": (lambda: TrustRatio(parameters(), lr=0.1), Reach.parameter, "rest of its parameter"),
    "Muon": (lambda: MuonWithAdamW()(nn.Linear(4, 4)), Reach.parameter, "does not take flat pieces"),
    "clips all": (lambda: ClipsAll(parameters(), lr=0.1), Reach.model, "depends on the others"),
    "around another": (lambda: Around(torch.optim.SGD(parameters(), lr=0.1)), Reach.model, "leaves the tensors"),
    "LBFGS": (lambda: torch.optim.LBFGS(parameters()), Reach.model, "could not be tried"),
}


@pytest.mark.parametrize("name", REACH)
def test_how_far_an_update_reaches_is_asked(name):
    make, reach, why = REACH[name]
    optimizer = make()
    before = copy.deepcopy((optimizer.param_groups, dict(optimizer.state)))
    answer = probe_optimizer(optimizer)
    assert answer.reach is reach
    assert why in answer.why
    assert str(before) == str((optimizer.param_groups, dict(optimizer.state)))


@pytest.mark.parametrize("decays", [(0.0, 0.1), (0.1, 0.0)])
def test_groups_with_and_without_decay_are_asked_apart(decays):
    groups = [{"params": parameters(), "weight_decay": decay} for decay in decays]
    optimizer = TrustRatioWhereDecayed(groups, lr=0.1)
    assert probe_optimizer(optimizer).reach is Reach.parameter
    assert [group["weight_decay"] for group in groups_of_wholes(optimizer, optimizer.param_groups)] == [0.1]


def test_a_schedule_and_a_rate_of_zero_do_not_hide_it():
    optimizer = Adafactor(parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    LambdaLR(optimizer, lambda step: 0.0)
    assert probe_optimizer(optimizer).reach is Reach.parameter
    assert not optimizer.state


def test_a_layout_refuses_what_reaches_further():
    adafactor, clips = Adafactor(parameters()), ClipsAll(parameters(), lr=0.1)
    check(adafactor, Reach.parameter, is_saved=True)
    check(clips, Reach.model, is_saved=True)
    with pytest.raises(ConfigError, match="Adafactor: the update of an element depends on the rest"):
        check(adafactor, Reach.element, is_saved=True)
    with pytest.raises(ConfigError, match="ClipsAll: the update of one parameter depends on the others"):
        check(clips, Reach.parameter, is_saved=True)


def test_what_no_checkpoint_can_hold_is_refused_where_there_are_some():
    optimizer = Counts(parameters())
    check(optimizer, Reach.element, is_saved=False)
    with pytest.raises(ConfigError, match="neither a number nor a tensor: seen"):
        check(optimizer, Reach.element, is_saved=True)
    assert moving_options(optimizer) == ["steps"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Adafactor, torch.optim.Adafactor])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_state_of_a_parameter_of_one_element_is_told_from_numbers(kind, shape):
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = kind([parameter])
    kept = StateReader(optimizer).kept_for(optimizer.param_groups[0], parameter)
    assert {piece.key for piece in kept.numbers} == {"step"} | ({"#RMS"} if kind is Adafactor else set())
    assert kept.tensors
    assert all(tensor.numel() == 1 for tensor in kept.tensors.values())


def test_what_belongs_to_no_parameter_stays_and_is_in_no_checkpoint():
    model = nn.Linear(3, 2)
    optimizer = CountsBeside(model.parameters(), lr=0.1)
    optimizer.state["steps"] = 7
    own = OwnOptimizer(optimizer, model)
    assert own.move_to(nn.Linear(3, 2)).state["steps"] == 7
    with pytest.raises(ConfigError, match="belongs to no parameter: steps"):
        check(optimizer, Reach.element, is_saved=True)
    check(optimizer, Reach.element, is_saved=False)


def test_looking_at_what_an_optimizer_keeps_draws_nothing_from_the_generators_of_the_training():
    model = nn.Linear(3, 2)
    optimizer = Noisy(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    assert probe_optimizer(optimizer).not_saved == ""
    ignores_gradient_size(optimizer)
    counts = [piece for piece in list_pieces(model, optimizer) if piece.key == "#count"]
    assert torch.equal(torch.get_rng_state(), before)
    assert [float(piece.view) for piece in counts] == [0, 0]
    counts[0].set_number(3.0)
    assert optimizer.state[model.weight]["count"] == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_asking_leaves_the_random_state_of_a_gpu_as_it_is():
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    probe_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(4, device="cuda"))]))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_whether_zeros_stand_for_nothing_is_asked():
    def starts(kind, **settings):
        optimizer = kind(parameters(), **settings)
        return starts_from_zeros(optimizer, optimizer.param_groups[0])

    assert starts(torch.optim.AdamW)
    assert all(
        starts_from_zeros(muon, group) for muon in [MuonWithAdamW()(nn.Linear(4, 4))] for group in muon.param_groups
    )
    assert starts(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert not starts(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)
    assert not starts(torch.optim.NAdam)


def test_several_step_as_each_by_itself():
    ours, theirs = parameters(), parameters()
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one.data)
    apart = [torch.optim.SGD(theirs[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(theirs[1:], lr=0.01)]
    joined = Joined([torch.optim.SGD(ours[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(ours[1:], lr=0.01)])
    schedule = LambdaLR(joined, lambda step: 1.0 / (1 + step))
    schedules = [LambdaLR(optimizer, lambda step: 1.0 / (1 + step)) for optimizer in apart]
    for number in range(4):
        for optimizer in (joined, *apart):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.full_like(parameter, number + 1.0)
            optimizer.step()
        for each in (schedule, *schedules):
            each.step()
        # As accelerate does: other groups and states take the place of those that it was made with.
        joined.load_state_dict(copy.deepcopy(joined.state_dict()))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert describe(joined) == "SGD and AdamW"


@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaForSequenceClassification])
def test_muon_steps_matrices_alone(kind):
    """Not embeddings, nor a head of any task: logits, scores, or values."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = kind(LlamaConfig(**sizes, num_attention_heads=2, num_labels=3))
    model.add_module("value", nn.Linear(8, 1, bias=False))
    num_matrices, num_norms = len([*model.model.layers.parameters()]) - 2, 3
    groups = [len(group["params"]) for group in MuonWithAdamW()(nn.Sequential(model)).param_groups]
    assert groups == [num_matrices, 3, num_norms]


class ToyExperts(nn.Module):
    """As classes of transformers have them: a stack of matrices, and of vectors."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.bias = nn.Parameter(torch.zeros(3, 8, 4)), nn.Parameter(torch.zeros(3, 8))


def test_stacks_of_matrices_are_those_of_experts():
    experts = ToyExperts()
    model = nn.Sequential(experts, nn.Linear(4, 4), nn.Conv1d(4, 4, 2))
    muon, decayed, others = MuonWithAdamW()(model).param_groups
    assert [id(p) for p in muon["params"]] == [id(experts.gate_up_proj), id(model[1].weight)]
    assert [id(p) for p in decayed["params"]] == [id(model[2].weight)]
    assert [id(p) for p in others["params"]] == [id(experts.bias), id(model[1].bias), id(model[2].bias)]


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}])
@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (5, 3)])
def test_a_stack_is_stepped_as_torch_steps_its_matrices(shape, settings):
    """But for how kernels round. Gradients are of very different sizes, and zero for an expert without tokens."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, *shape, generator=generator)
    stack, matrices = nn.Parameter(start.clone()), [nn.Parameter(one.clone()) for one in start]
    ours, theirs = Muon([nn.Parameter(torch.zeros(1, 1))], **settings), torch.optim.Muon(matrices, **settings)
    ours.param_groups[0]["params"] = [stack]
    for size in (1e-6, 1e-2, 10.0):
        stack.grad = torch.randn(4, *shape, generator=generator) * size
        stack.grad[2] = 0
        for one, gradient in zip(matrices, stack.grad, strict=True):
            one.grad = gradient.clone()
        ours.step()
        theirs.step()
    expected = torch.stack(matrices) - start
    assert (stack - start - expected).abs().max() <= 0.02 * expected.abs().max()
    assert torch.equal(ours.state[stack]["momentum_buffer"][1], theirs.state[matrices[1]]["momentum_buffer"])
    assert stack[2].isfinite().all()


def test_tensors_that_are_not_the_models_are_refused():
    with pytest.raises(ConfigError, match="no parameters of the model"):
        OwnOptimizer(torch.optim.SGD(parameters(), lr=0.1), nn.Linear(2, 2))


def test_under_zero_an_optimizer_steps_all_that_is_trained():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(ConfigError, match="without 1 of them, such as bias"):
        check_steps_all(optimizer, model)
    model.bias.requires_grad_(False)
    check_steps_all(optimizer, model)


NOT_BY_NAME = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw, with optimizer.fused",
    "adamw_torch_xla": "another device",
    "adamw_torch_npu_fused": "another device",
    "adamw_anyprecision": "of a library that is no longer published",
    "lomo": "steps in the backward",
    "adalomo": "steps in the backward",
}


def test_the_config_has_transformers_names():
    """GaLore and APOLLO project chosen layers, which further arguments name: they are chosen from Python."""
    theirs = {name.value for name in OptimizerNames} - NOT_BY_NAME.keys()
    theirs = {name for name in theirs if not name.startswith(("galore", "apollo"))}
    assert {name.value for name in OptimizerName} == theirs | {"adamw", "muon"}


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(compose_config(["model=tiny", *overrides]))
    return caught.value


def test_settings_are_those_of_the_class():
    check_optimizer(compose_config(["optimizer.name=sgd", "optimizer.arguments={momentum: 0.9, nesterov: true}"]))
    assert refusal("optimizer.name=sgd", "optimizer.arguments.momentun=0.9").hint == "optimizer.arguments.momentum=0.9"
    assert refusal("optimizer.name=sgd", "optimizer.arguments.lr=0.9").hint == "optimizer.lr=..."
    assert refusal("optimizer.arguments={betas: [0.9, 0.9]}").hint == "optimizer.beta1=... optimizer.beta2=..."
    assert "Invalid momentum value" in refusal("optimizer.name=sgd", "optimizer.arguments.momentum=-1").what


PLUGIN = """
import torch
class Averaged(torch.optim.Optimizer):
    \"\"\"Steps along a running mean of the gradients, which it keeps.\"\"\"
    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["decay"])
                    parameter.add_(mean, alpha=-group["lr"])
def function(params, lr):
    pass
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "toyoptimizers", PLUGIN, GROUP, averaged="Averaged", other="function")


def test_a_plugins_settings_are_those_that_it_takes(plugin):
    config = compose_config(["optimizer.plugin=averaged", "optimizer.arguments.decay=0.5", "optimizer.lr=0.25"])
    kind, settings = find_optimizer(config.optimizer, warmup_steps=0)
    assert (kind.__module__, settings) == ("toyoptimizers", {"lr": 0.25, "decay": 0.5})
    check_optimizer(config)
    assert refusal("optimizer.plugin=averaged", "optimizer.arguments.decai=0.9").hint == "optimizer.arguments.decay=0.9"


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (["optimizer.plugin=averagd"], "no installed package offers this optimizer", "optimizer.plugin=averaged"),
        (["optimizer.plugin=os.system"], "no installed package offers this optimizer", "entry point"),
        (["optimizer.plugin=other"], "no optimizer", ""),
        (["optimizer.plugin=averaged", "optimizer.name=sgd"], "given by two keys", "optimizer.name=adamw"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused(plugin, overrides, what, hint):
    refused = refusal(*overrides)
    assert what in refused.what
    assert "optimizer.plugin" in refused.where
    assert hint in str(refused.hint)


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("hfdist.optim.registry.find_spec", lambda module: None)
    for name, package in (("paged_lion_8bit", "bitsandbytes"), ("adamw_torch_4bit", "torchao"),
                          ("stable_adamw", "torch-optimi"), ("ademamix", "bitsandbytes")):  # fmt: skip
        assert refusal(f"optimizer.name={name}").hint == f"pip install {package}"
    assert refusal("optimizer.name=schedule_free_sgd").hint == "optimizer.schedule=constant"


@pytest.mark.parametrize("layout", ["zero1", "zero3", "pipeline_zero1", "fsdp2", "tensor", "moe", "3d"])
def test_layouts_that_gather_whole_matrices_take_muon(layout):
    check_optimizer(compose_config(["model=tiny", "optimizer.name=muon", f"strategy={layout}"]))


@pytest.mark.parametrize(("name", "is_whole"), [("sgd", False), ("adafactor", True), ("muon", True)])
def test_a_plan_asks_of_a_model_without_values_what_must_be_stepped_whole(name, is_whole):
    config = compose_config(["model=tiny", f"optimizer.name={name}"]).optimizer
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        assert stepped_whole(config, model) == (16,) * is_whole


def test_the_summary_counts_what_is_kept():
    assert values_per_weight(torch.optim.AdamW(parameters())) == 2
    assert values_per_weight(torch.optim.SGD(parameters())) == 0
    assert values_per_weight(Adafactor(parameters(), lr=1e-3, relative_step=False, scale_parameter=False)) < 0.01
