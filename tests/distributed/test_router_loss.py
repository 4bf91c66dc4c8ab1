"""The loss over routers: in every layout that of one forward of the whole global batch by transformers itself."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

import hfdist
from hfdist.testing import run_ranks
from hfdist.trainer.step.router_loss import RouterLoss
from tests.marks import many

pytestmark = pytest.mark.distributed

LENGTH, GLOBAL_BATCH, STEPS, COEFFICIENT = 16, 8, 2, 0.3
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "num_experts_per_tok": 2}  # fmt: skip
KINDS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": [0, 1]},
    "jetmoe": {"num_local_experts": 4, "num_key_value_heads": 2, "kv_channels": 8},
}


def make_items(num_items):
    """Sequences of very different lengths, padded, some without any target."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for number in range(num_items):
        ids = torch.randint(0, 64, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - number * 5 % 13).long()
        is_target = (mask == 1) & (torch.arange(LENGTH) > number * 3 % 7) & (number % 6 != 5)
        items.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(is_target, ids, -100)})
    return items


def make_model(kind):
    fields = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "aux_loss_coef": COEFFICIENT}
    empty = AutoConfig.for_model(kind)
    fields = {name: value for name, value in (TINY | fields | KINDS[kind]).items() if hasattr(empty, name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                # So that experts are chosen unevenly, and the loss moves them.
                parameter.normal_(std=0.5)
    return model


def train_all(folder, kinds, layout, *more):
    return {kind: train(folder / kind, kind, layout, *more) for kind in kinds}


def train(folder, kind, layout, arguments=None, spoil=None, num_items=GLOBAL_BATCH * STEPS):
    """Train in a layout; `original`: by transformers' own Trainer."""
    if spoil is not None:
        spoil()
    items = make_items(num_items)
    more = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "save_strategy": "steps", "save_steps": 1,
            "optim": "sgd", "learning_rate": 2.0, "lr_scheduler_type": "constant", "logging_steps": 1,
            "disable_tqdm": True} | (arguments or {})  # fmt: skip
    data = {"train_dataset": items, "eval_dataset": items[:6]}
    if layout == "original":
        trainer = transformers.Trainer(make_model(kind), TrainingArguments(str(folder), **more), **data)
    else:
        strategy = hfdist.make_strategy(**{"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2} | layout)
        model = make_model(kind)
        args = TrainingArguments(str(folder), **more | strategy.training_arguments())
        trainer = hfdist.Trainer(model, args, strategy=strategy, **data)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return lines, trainer.evaluate()["eval_loss"]


ORIGINAL = {"per_device_train_batch_size": GLOBAL_BATCH, "per_device_eval_batch_size": 6}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By kind: of the original Trainer, with the global batch in one forward."""
    folder = tmp_path_factory.mktemp("original")
    [found] = run_ranks(train_all, 1, folder, list(KINDS), "original", ORIGINAL, group=False)
    return {kind: (folder / kind, lines) for kind, (lines, _) in found.items()}


def saved(folder, step):
    model = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{step}")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(whole, folder, lines, kind):
    """Losses, norms, each parameter's first gradient, and the weights at the end."""
    theirs, reference = whole[kind]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in reference], rel=2e-6)
    assert [line["grad_norm"] for line in lines] == pytest.approx([line["grad_norm"] for line in reference], rel=1e-5)
    start = {name: parameter.detach() for name, parameter in make_model(kind).named_parameters()}
    for step in (1, STEPS):
        ours, originals = saved(folder, step), saved(theirs, step)
        for name, before in start.items():
            moved = originals[name] - before
            # The second is the rounding of weights.
            bound = 1e-5 * moved.norm() + 2e-7 * before.norm()
            assert (ours[name] - originals[name]).norm() <= bound, (step, name)


def in_layouts(folder, cases, *more):
    """Train kinds in a layout each, one after the other; one process keeps what ZeRO-3 sets, so it comes last."""
    return [train_all(folder / str(number), kinds, layout, *more) for number, (layout, kinds) in enumerate(cases)]


# FSDP2, and a pipeline of another kind, are below.
CASES = [
    (1, [({}, ["mixtral"])]),
    (
        2,
        [
            ({"context": 2}, ["mixtral"]),
            ({"tensor": 2}, ["qwen3_moe"]),
            ({"pipeline": 2}, ["jetmoe"]),
            ({"expert": 2}, ["mixtral"]),
            ({"sharding": "zero3"}, ["mixtral"]),
        ],
    ),
    many(1, [({}, ["jetmoe"]), ({"micro_batch_size": 8}, ["jetmoe"])]),
    many(
        2,
        [
            ({"micro_batch_size": 4}, ["qwen3_moe"]),
            ({"sharding": "fsdp2"}, ["mixtral", "jetmoe"]),
            ({"pipeline": 2}, ["qwen3_moe"]),
            ({"pipeline": 2, "schedule": "zbv"}, ["mixtral"]),
            ({"expert": 2}, ["qwen3_moe"]),
            ({"sharding": "zero1"}, ["qwen3_moe"]),
        ],
    ),
    many(
        4,
        [
            ({"sharding": "fsdp2", "replicate": 2}, ["qwen3_moe"]),
            ({"context": 2, "tensor": 2}, ["qwen3_moe"]),
            ({"pipeline": 2, "sharding": "fsdp2", "schedule": "interleaved_1f1b"}, ["mixtral"]),
            ({"pipeline": 2, "expert": 2, "sharding": "fsdp2"}, ["mixtral"]),
            ({"pipeline": 2, "tensor": 2}, ["mixtral"]),
            ({"pipeline": 2, "sharding": "zero1"}, ["mixtral"]),
        ],
    ),
]


@pytest.mark.parametrize(("num_ranks", "cases"), CASES)
def test_losses_gradients_and_weights_are_those_of_one_forward(whole, tmp_path, num_ranks, cases):
    found = run_ranks(in_layouts, num_ranks, tmp_path, cases, timeout_seconds=280)[0]
    for number, of_layout in enumerate(found):
        for kind, (lines, _) in of_layout.items():
            check(whole, tmp_path / str(number) / kind, lines, kind)


def without_counting():
    """The mistake: what the first micro batch has chosen stands for the step."""
    RouterLoss._count_beforehand = lambda self, batches, hooks: None


@pytest.mark.many
def test_what_micro_batches_have_chosen_by_themselves_shows(whole, tmp_path):
    lines, _ = run_ranks(train, 1, tmp_path, "mixtral", {}, None, without_counting, group=False)[0]
    differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(lines, whole["mixtral"][1], strict=True)]
    assert max(differences) > 1e-3
    with pytest.raises(AssertionError):
        check(whole, tmp_path, lines, "mixtral")


def summary(lines):
    names = ("loss", "grad_norm", "router_aux_loss", "expert_load_max", "expert_load_min")
    return [[line[name] for name in names] for line in lines]


RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("layouts", "arguments"), [([{"pipeline": 2}, {"sharding": "fsdp2"}], RECOMPUTED), many([{}], {})]
)
def test_the_end_of_an_epoch_recomputed_blocks_and_figures(tmp_path, layouts, arguments):
    """11 rows in batches of 8: in the second step ranks have rows that fill up, and do not count."""
    alone = {"micro_batch_size": 8}, {}, None, 11
    [(reference, held_out)] = run_ranks(train, 1, tmp_path / "1", "qwen3_moe", *alone, group=False)
    cases = [(layout, ["qwen3_moe"]) for layout in layouts]
    for of_layout in run_ranks(in_layouts, 2, tmp_path, cases, arguments, None, 11)[0]:
        ours, our_held_out = of_layout["qwen3_moe"]
        for own, theirs in zip(summary(ours), summary(reference), strict=True):
            assert own == pytest.approx(theirs, rel=1e-5)
        assert our_held_out == pytest.approx(held_out, rel=1e-6)


class _Logs(TrainerCallback):
    """A user's own line, on one rank alone."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **named):
        if state.is_world_process_zero:
            self.trainer.log({"loss": 7.0})


def figures_beside_lines_of_one_rank(folder):
    """Of a model without the loss over routers, whose choices ranks tell each other for the figures alone."""
    found = []
    for makes_callbacks in ((), (_Logs,)):
        strategy = hfdist.make_strategy(global_batch_size=GLOBAL_BATCH, micro_batch_size=1)
        model = make_model("qwen3_moe")
        model.config.output_router_logits = False
        args = TrainingArguments(str(folder), max_steps=STEPS, logging_steps=1, use_cpu=True, report_to=[],
                                 save_strategy="no", disable_tqdm=True, **strategy.training_arguments())  # fmt: skip
        items = make_items(GLOBAL_BATCH * STEPS)
        trainer = hfdist.Trainer(model, args, strategy=strategy, train_dataset=items)
        for make in makes_callbacks:
            trainer.add_callback(make(trainer))
        trainer.train()
        found.append([line for line in trainer.state.log_history if "loss" in line])
    return found


def test_a_line_that_one_rank_logs_waits_for_no_other_and_takes_no_figures(tmp_path):
    plain, lines = run_ranks(figures_beside_lines_of_one_rank, 2, tmp_path)[0]
    own = [line for line in lines if line["loss"] == 7.0]
    assert len(own) == STEPS
    assert all(line.keys() == {"loss", "epoch", "step"} for line in own)
    names = ("loss", "expert_load_max", "expert_load_min", "tokens")
    assert [[line[name] for name in names] for line in lines if line not in own] == [
        [line[name] for name in names] for line in plain
    ]
