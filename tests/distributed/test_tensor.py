"""Tensor parallelism beyond the numbers of test_layouts.py: families under accumulation, and what is refused."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError, DataError
from hfdist.strategies import tensor, tensor_plan
from hfdist.strategies.base import TrainerHooks
from hfdist.testing import run_ranks
from hfdist.trainer.fault_tolerance.replicas import find_differences
from tests.distributed.test_optimizers import saved
from tests.distributed.test_trainer import GLOBAL_BATCH, STEPS, history, uneven_items
from tests.zoo.tensor_parallel import tensor_types

pytestmark = pytest.mark.distributed

# Tied; norms of queries and keys; packed experts; both; gathered queries and keys; gathered gate and up.
FAMILIES = ("llama", "qwen3", "mixtral", "gemma3_text", "olmo2", "phi3")


@pytest.mark.parametrize(
    ("num_ranks", "sharding", "families"),
    [(2, Sharding.none, FAMILIES), (4, Sharding.none, ("qwen3",)), (4, Sharding.fsdp2, ("gemma3_text", "mixtral"))],
)
def test_losses_and_gradients_of_accumulated_micro_batches_are_those_of_the_whole_model(num_ranks, sharding, families):
    for of_rank in run_ranks(tensor_types, num_ranks, families, sharding):
        for model_type, outcome in of_rank.items():
            assert outcome.verdict == "exact", (model_type, outcome)
            assert outcome.gradient_difference < 1e-5, (model_type, outcome)


def without_sums(model_type):
    """The mistake: gradients that each rank has of its own heads only are taken for whole ones."""
    make_plan = tensor_plan.make_plan

    def spoilt(*args):
        return dataclasses.replace(make_plan(*args), partial=frozenset())

    tensor.make_plan = spoilt
    return tensor_types([model_type])[model_type].reason


def test_a_wrong_plan_is_refused_by_the_name_of_the_first_wrong_parameter():
    for reason in run_ranks(without_sums, 2, "qwen3"):
        assert "does not train over tensor ranks as it does on one process" in reason
        assert "the first that is wrong: model.layers.0.self_attn.q_norm.weight" in reason


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("apertus", "the first that is wrong: model.layers.0.mlp.act_fn.alpha_p"),
        ("gpt2", "no plan"),
        ("gpt_oss", "shards nothing"),
    ],
)
def test_types_that_would_be_wrong_are_refused(model_type, words):
    for of_rank in run_ranks(tensor_types, 2, [model_type]):
        assert words in of_rank[model_type].reason


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 64}  # fmt: skip


def make_model(**fields):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields))


def make_strategy(**layout):
    return hfdist.make_strategy(global_batch_size=GLOBAL_BATCH, micro_batch_size=1, **{"tensor": 2} | layout)


def refusal(fields, layout):
    with pytest.raises(ConfigError) as caught:
        make_strategy(**layout).build(make_model(**fields))
    return caught.value


@pytest.mark.parametrize(
    ("fields", "num_ranks", "found", "allowed"),
    [
        ({"num_key_value_heads": 1}, 2, "2, and num_key_value_heads: 1", "1"),
        ({"num_key_value_heads": 2, "intermediate_size": 66}, 4, "4, and num_key_value_heads: 2", "1, 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_fit(fields, num_ranks, found, allowed):
    for error in run_ranks(refusal, num_ranks, fields, {"tensor": num_ranks}):
        assert (error.where, error.found, error.allowed) == ("strategy.tensor", found, allowed)


def refusals_of_a_trainer(folder):
    """What needs whole matrices, adapters, and what the original would gather from all ranks."""
    found = {}

    def attempt(name, action):
        with pytest.raises(ConfigError) as caught:
            action()
        found[name] = caught.value.what

    attempt("adafactor", make_trainer(folder, arguments={"optim": "adafactor"}).train)
    muon = (hfdist.MuonWithAdamW, {"lr": 1e-2})
    attempt("muon", make_trainer(folder, more={"optimizer_cls_and_kwargs": muon}).train)
    attempt("metrics", lambda: make_trainer(folder, more={"compute_metrics": lambda predictions: {}}))
    adapted = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))
    attempt("adapter", lambda: make_strategy().build(adapted))
    return found


def test_what_does_not_fit_is_refused(tmp_path):
    for found in run_ranks(refusals_of_a_trainer, 2, tmp_path):
        for name in ("adafactor", "muon"):
            assert "does not train in this layout as it does on one process" in found[name]
        assert "gathers logits of all ranks" in found["metrics"]
        assert "without an adapter" in found["adapter"]


def drawn_apart(layout):
    """Each rank draws weights of its own, as a program without a seed does."""
    model = make_model()
    torch.manual_seed(dist.get_rank())
    drawn = {name: nn.init.normal_(parameter).detach().clone() for name, parameter in model.named_parameters()}
    own = drawn["lm_head.weight"].clone()
    for values in drawn.values():
        dist.broadcast(values, 0)
    engine = make_strategy(**layout).build(model)
    own_and_whole = [(piece, piece.of_whole(drawn[piece.name])) for piece in engine.pieces()]
    differing = [piece.name for piece, whole in own_and_whole if not torch.equal(piece.view, whole)]
    return differing, len(own_and_whole), torch.equal(own, drawn["lm_head.weight"])


@pytest.mark.parametrize("layout", [{}, {"sharding": "fsdp2"}])
def test_all_ranks_start_from_the_weights_of_rank_0(layout):
    for rank, (differing, num_pieces, is_own) in enumerate(run_ranks(drawn_apart, 4, layout)):
        assert differing == []
        assert num_pieces > 10
        assert is_own == (rank == 0)


def make_trainer(folder, model=None, arguments=None, items=None, more=None, **layout):
    strategy = make_strategy(**layout)
    fields = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "save_strategy": "steps", "save_steps": 2,
              "learning_rate": 1e-2, "logging_steps": 1}  # fmt: skip
    args = TrainingArguments(str(folder), **fields | (arguments or {}), **strategy.training_arguments())
    items = items or uneven_items()
    datasets = {"train_dataset": items, "eval_dataset": items[:4]}
    return hfdist.Trainer(model or make_model(), args, strategy=strategy, **datasets, **more or {})


def train(folder, layout, spoil=None):
    if spoil is not None:
        spoil()
    trainer = make_trainer(folder, **layout)
    trainer.train()
    return history(trainer), trainer.evaluate()["eval_loss"]


LAYOUTS = [(2, {}), (4, {"tensor": 4}), (4, {"sharding": "fsdp2"})]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, run_ranks(train, 1, folder, {"tensor": 1}, group=False)[0]


WITH_CONTEXT = [
    (4, {"context": 2, "context_method": "ulysses"}),
    (4, {"context": 2, "context_method": "gather", "sharding": "fsdp2"}),
    (8, {"context": 2, "sharding": "fsdp2", "replicate": 2}),
]


@pytest.mark.parametrize(("num_ranks", "layout"), [*LAYOUTS, (4, {"sharding": "fsdp2", "replicate": 2}), *WITH_CONTEXT])
def test_losses_norms_weights_and_moments_are_those_of_one_process(single, tmp_path, num_ranks, layout):
    folder, (reference, eval_loss) = single
    ours, our_eval_loss = run_ranks(train, num_ranks, tmp_path, layout)[0]
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in reference], rel=1e-6)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in reference], rel=1e-5)
    assert our_eval_loss == pytest.approx(eval_loss, rel=1e-6)
    theirs, whole = saved(tmp_path), saved(folder)
    assert theirs.keys() == whole.keys()
    for name, values in whole.items():
        assert torch.allclose(theirs[name], values, rtol=1e-4, atol=1e-5), name


def counting_tensor_ranks():
    """The mistake of counting each rank of a group as one that has a loss of its own."""
    hfdist.Trainer.get_tp_size = lambda trainer: 1


def test_a_loss_that_counts_tensor_ranks_shows(single, tmp_path):
    _, (reference, _) = single
    ours, _ = run_ranks(train, 2, tmp_path, {}, counting_tensor_ranks)[0]
    assert ours[0][1] == pytest.approx(2 * reference[0][1], rel=1e-3)


def counting_whole_parameters_twice():
    """The mistake of a norm in which each tensor rank counts what is whole on all."""
    tensor.TensorParts.counts = lambda parts, name: True


def adding_up_whole_gradients():
    """The mistake of taking every gradient for a part."""
    reduce = tensor.TensorParts.reduce_gradients

    def spoilt(parts, model):
        parts._partial = frozenset(name for name, _ in model.named_parameters())
        reduce(parts, model)

    tensor.TensorParts.reduce_gradients = spoilt
    tensor.check_plan = lambda *args: None


@pytest.mark.parametrize("spoil", [counting_whole_parameters_twice, adding_up_whole_gradients])
def test_a_wrong_norm_or_gradient_shows(single, tmp_path, spoil):
    _, (reference, _) = single
    ours, _ = run_ranks(train, 4, tmp_path, {"context": 2}, spoil)[0]
    assert ours[0][1] > 1.01 * reference[0][1]


def with_dropout(folder, layout):
    """Each rank's generators stand elsewhere, as behind a checkpoint of another layout."""
    torch.manual_seed(dist.get_rank())
    trainer = make_trainer(folder, make_model(attention_dropout=0.5), {"save_strategy": "no"}, **layout)
    setup = trainer.engine.setup

    def apart(*prepared):
        torch.manual_seed(100 + dist.get_rank())
        return setup(*prepared)

    trainer.engine.setup = apart
    trainer.train()
    return find_differences(trainer.engine.whole_parameters()), torch.rand(3).tolist()


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS[:1] + LAYOUTS[2:])
def test_the_ranks_of_a_group_draw_alike_and_stay_alike(tmp_path, num_ranks, layout):
    found = run_ranks(with_dropout, num_ranks, tmp_path, layout)
    assert all(not differences for differences, _ in found)
    assert found[0][1] == found[1][1]


def other_batches(folder):
    items = uneven_items()
    for item in items:
        item["input_ids"] = (item["input_ids"] + dist.get_rank()) % 64
    with pytest.raises(DataError, match="the ranks of one tensor group were given different batches"):
        make_trainer(folder, items=items).train()


def test_different_batches_within_a_group_are_refused(tmp_path):
    run_ranks(other_batches, 2, tmp_path)


def forward_values(folder):
    trainer = make_trainer(folder)
    batch = {"input_ids": torch.arange(8)[None]}
    hooks = TrainerHooks(model=trainer.model, training_step=trainer.training_step, loss=trainer.weighted_loss.of)
    values = trainer.engine.forward(batch, lambda model, part: model(**part).logits, hooks)
    return [value.numpy() for value in values], make_model()(**batch).logits.detach().numpy()


def test_one_rank_of_a_group_has_logits(tmp_path):
    (first, whole), (second, _) = run_ranks(forward_values, 2, tmp_path)
    assert second == []
    assert abs(first[0] - whole).max() < 1e-5
