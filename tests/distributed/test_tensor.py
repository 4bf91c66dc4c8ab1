"""Tensor parallelism beyond the numbers of test_layouts.py: families under accumulation, and what is refused."""

import copy
import dataclasses
import gc
import time

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.errors import ConfigError, DataError
from hfdist.models.loss import LossHead
from hfdist.strategies import parallel_plans
from hfdist.strategies.engine import TrainerHooks
from hfdist.strategies.parts import ModelParts
from hfdist.strategies.tensor import linear, plan
from hfdist.strategies.tensor.plan import ALL_GATHERED
from hfdist.testing import run_ranks
from hfdist.trainer.fault_tolerance.bit_comparison import find_differences
from hfdist.trainer.run_options import RunOptions
from tests.distributed.test_optimizers import saved
from tests.distributed.trainers import GLOBAL_BATCH, STEPS, history, uneven_items
from tests.marks import many
from tests.zoo.models import tiny_batch, tiny_model
from tests.zoo.sharding import tensor_types, try_types

pytestmark = pytest.mark.distributed

# Beside those of the zoo: tied, with norms of queries and keys; gathered queries and keys; gathered gate and up.
FAMILIES = ("gemma3_text", "olmo2", "phi3")
# Wrong plans; none; layers that are no nn.Linear, or derived from it; weights that a class reads itself; a plan that
# divides nothing but the head.
FALLING_BACK = {"apertus": plan.ALL_GATHERED, "opt": plan.ALL_GATHERED, "gpt2": plan.ALL_GATHERED,
                "falcon": plan.ALL_GATHERED, "mamba": plan.ALL_GATHERED,
                "gpt_oss": plan.OWN_GATHERED}  # fmt: skip
"""Types whose plan is missing or wrong train by another."""


@pytest.mark.parametrize(
    ("num_ranks", "sharding", "types"),
    [
        # Of gpt_oss the plan is another.
        (2, Sharding.none, (*FAMILIES[1:], "gpt_oss")),
        many(2, Sharding.none, (FAMILIES[0], "apertus", "opt", "gpt2", "falcon", "mamba")),
        many(4, Sharding.none, ("qwen3",)),
        many(4, Sharding.fsdp2, ("gemma3_text", "mixtral")),
    ],
)
def test_losses_and_gradients_of_accumulated_micro_batches_are_those_of_the_whole_model(num_ranks, sharding, types):
    for of_rank in run_ranks(tensor_types, num_ranks, types, sharding):
        for model_type, outcome in of_rank.items():
            assert outcome.verdict == "exact", (model_type, outcome)
            assert outcome.gradient_difference < 1e-5, (model_type, outcome)
            if model_type in FALLING_BACK:
                assert outcome.plan == FALLING_BACK[model_type], (model_type, outcome)


def without_sums(model_type):
    """The mistake: gradients that each rank has of its own heads only are taken for whole ones."""
    make_plan = plan.make_plan
    parallel_plans.make_plan = lambda *args: dataclasses.replace(make_plan(*args), partial=frozenset())
    return tensor_types([model_type])[model_type]


def without_any_sums(model_type):
    """And another: a gathered layer's input has the gradient of this rank's rows alone."""
    linear._SumGradient.backward = staticmethod(lambda ctx, gradient: (gradient, None))
    return without_sums(model_type)


def with_mistakes(model_type):
    return without_sums(model_type), without_any_sums(model_type)


def test_a_wrong_plan_makes_room_for_the_gathered_one_or_the_first_wrong_parameter_is_named():
    for outcome, refused in run_ranks(with_mistakes, 2, "qwen3"):
        assert (outcome.verdict, outcome.plan) == ("exact", plan.ALL_GATHERED), outcome
        assert "does not train over tensor ranks as it does on one process" in refused.reason
        assert "the first that is wrong: model.embed_tokens.weight" in refused.reason


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 64}  # fmt: skip


def make_model(**fields):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields))


def make_strategy(**layout):
    return hfdist.make_strategy(global_batch_size=GLOBAL_BATCH, micro_batch_size=2, **{"tensor": 2} | layout)


def refusals_of_a_trainer(folder):
    """PEFT's wrapper, an adapter that reads weights, and what the original would gather from all ranks."""
    found = {}

    def attempt(name, action):
        with pytest.raises(ConfigError) as caught:
            action()
        found[name] = caught.value.what

    attempt("metrics", lambda: make_trainer(folder, more={"compute_metrics": lambda predictions: {}}))
    adapted = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"]))
    attempt("wrapper", lambda: make_strategy().build(adapted))
    model = make_model()
    model.add_adapter(LoraConfig(target_modules="all-linear", use_dora=True))
    attempt("adapter", lambda: make_strategy().build(model))
    lora = make_model()
    lora.add_adapter(LoraConfig(target_modules=["q_proj"]))
    attempt("adapter, tokens shared", lambda: make_strategy(sequence=True).build(lora))
    return found


def test_what_does_not_fit_is_refused(tmp_path):
    for found in run_ranks(refusals_of_a_trainer, 2, tmp_path):
        assert "gathers logits of all ranks" in found["metrics"]
        assert "only a model of transformers" in found["wrapper"]
        assert "this adapter cannot be divided" in found["adapter"]
        assert "share no tokens beside an adapter" in found["adapter, tokens shared"]


def drawn_apart(layouts):
    """Each rank draws weights of its own, as a program without a seed does."""
    found = []
    for layout in layouts:
        model = make_model()
        torch.manual_seed(dist.get_rank())
        drawn = {name: nn.init.normal_(parameter).detach().clone() for name, parameter in model.named_parameters()}
        own = drawn["lm_head.weight"].clone()
        for values in drawn.values():
            dist.broadcast(values, 0)
        engine = make_strategy(**layout).build(model)
        own_and_whole = [(piece, piece.of_whole(drawn[piece.name])) for piece in engine.pieces()]
        differing = [piece.name for piece, whole in own_and_whole if not torch.equal(piece.view, whole)]
        found.append((differing, len(own_and_whole), torch.equal(own, drawn["lm_head.weight"])))
    return found


def test_all_ranks_start_from_the_weights_of_rank_0():
    for rank, found in enumerate(run_ranks(drawn_apart, 4, [{}, {"sharding": "fsdp2"}])):
        for differing, num_pieces, is_own in found:
            assert differing == []
            assert num_pieces > 10
            assert is_own == (rank == 0)


def make_trainer(folder, model=None, arguments=None, items=None, more=None, **layout):
    strategy = make_strategy(**layout)
    fields = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "save_strategy": "steps", "save_steps": 2,
              "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
              # Adam makes whole steps of gradients that are zero but for rounding.
              "adam_epsilon": 1e-4}  # fmt: skip
    args = TrainingArguments(str(folder), **fields | (arguments or {}), **strategy.training_arguments())
    items = items or uneven_items()
    datasets = {"train_dataset": items, "eval_dataset": items[:4]}
    return hfdist.Trainer(model or make_model(), args, strategy=strategy, **datasets, **more or {})


def train(folder, layout, spoil=None, fields=None, resume=None, max_steps=STEPS):
    if spoil is not None:
        spoil()
    # One process computes the loss from whole logits.
    head = LossHead() if layout["tensor"] > 1 else None
    more = {"options": RunOptions(loss_head=head)}
    trainer = make_trainer(folder, make_model(**fields or {}), {"max_steps": max_steps}, more=more, **layout)
    trainer.train(resume_from_checkpoint=resume)
    assert head is None or not head._is_over
    return history(trainer), trainer.evaluate()["eval_loss"]


PLAIN = [(2, {"tensor": 2}), (4, {"tensor": 2, "sharding": "fsdp2"})]
# Without another axis in test_layouts.py; and the first half of a run whose sizes do not divide, below.
LAYOUTS = [many(*PLAIN[0]), many(4, {"tensor": 4}), many(*PLAIN[1])]


def train_single(tmp_path_factory, **fields):
    folder = tmp_path_factory.mktemp("single")
    return folder, run_ranks(train, 1, folder, {"tensor": 1}, None, fields, group=False)[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train_single(tmp_path_factory)


def check(ours, reference, folder, single_folder):
    (ours, our_eval_loss), (reference, eval_loss) = ours, reference
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in reference], rel=1e-6)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in reference], rel=1e-5)
    assert our_eval_loss == pytest.approx(eval_loss, rel=1e-6)
    theirs, whole = saved(folder), saved(single_folder)
    assert theirs.keys() == whole.keys()
    for name, values in whole.items():
        assert torch.allclose(theirs[name], values, rtol=1e-4, atol=1e-5), name


WITH_CONTEXT = [
    many(4, {"tensor": 2, "context": 2, "context_method": "ulysses"}),
    (4, {"tensor": 2, "context": 2, "context_method": "gather", "sharding": "fsdp2"}),
    many(8, {"tensor": 2, "context": 2, "sharding": "fsdp2"}),
    many(8, {"tensor": 2, "context": 2, "sharding": "fsdp2", "replicate": 2}),
]


IN_PIPELINES = [
    (4, {"tensor": 2, "pipeline": 2}),
    # A step of it is compared in test_pipeline_mesh.py.
    many(8, {"tensor": 2, "pipeline": 2, "sharding": "fsdp2"}),
    many(8, {"tensor": 2, "pipeline": 2, "sharding": "fsdp2", "context": 2}),
    many(4, {"tensor": 1, "pipeline": 2, "context": 2}),
]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [*LAYOUTS, many(4, {"tensor": 2, "sharding": "fsdp2", "replicate": 2}), *WITH_CONTEXT, *IN_PIPELINES],
)
def test_losses_norms_weights_and_moments_are_those_of_one_process(single, tmp_path, num_ranks, layout):
    folder, reference = single
    check(run_ranks(train, num_ranks, tmp_path, layout)[0], reference, tmp_path, folder)


def train_with_shared_tokens(folder, layout, max_steps=STEPS, resume=None):
    more = {"options": RunOptions(loss_head=LossHead())}
    fields = {"max_steps": max_steps, "gradient_checkpointing": True}
    trainer = make_trainer(folder, make_model(), fields, more=more, sequence=True, **layout)
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer), trainer.evaluate()["eval_loss"]


def test_ranks_that_share_tokens_train_as_one_process(single, tmp_path):
    folder, reference = single
    check(run_ranks(train_with_shared_tokens, 2, tmp_path, {"tensor": 2})[0], reference, tmp_path, folder)


@pytest.mark.many  # what they save are pieces as of other tensor ranks, which resume below
@pytest.mark.parametrize("layout", [{"tensor": 4}, {"tensor": 2, "sharding": "fsdp2"}, {"tensor": 2, "pipeline": 2}])
def test_ranks_that_share_tokens_resume_in_another_layout(single, tmp_path, layout):
    folder, reference = single
    run_ranks(train_with_shared_tokens, 2, tmp_path, {"tensor": 2}, 2)
    found = run_ranks(train_with_shared_tokens, 4, tmp_path, layout, STEPS, tmp_path / "checkpoint-2")[0]
    check(found, reference, tmp_path, folder)


WITH_DROPOUT = [
    ("phi", {"resid_pdrop": 0.5}),
    ("starcoder2", {"residual_dropout": 0.5, "attention_dropout": 0.5}),
]
"""By a module, and by functions; of attention's each tensor rank draws the mask of its heads."""


def two_forwards(model):
    """Give the states of two batches of other lengths, and their loss, with blocks that are computed again."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    outputs = [model(**tiny_batch(model, 2, tokens), output_hidden_states=True) for tokens in (15, 8)]
    loss = outputs[0].loss + outputs[1].loss
    loss.backward()
    return [state.detach() for output in outputs for state in output.hidden_states], loss.item()


def differences_without_shares(model_type, fields):
    """From one process, or from tensor ranks that draw as many numbers."""
    model = tiny_model(model_type, 2, **fields)
    engine = make_strategy(sequence=True).build(copy.deepcopy(model))
    reference = make_strategy().build(model) if "attention_dropout" in fields else None
    (states, loss), (own_states, own_loss) = two_forwards(model), two_forwards(engine.model)
    whole_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = whole_norm if reference is None else reference.clip_grad_norm(0)
    is_alike = [torch.allclose(own, whole, atol=1e-5) for own, whole in zip(own_states, states, strict=True)]
    return is_alike, own_loss / loss - 1, float(engine.clip_grad_norm(0) / norm) - 1


def held_by_blocks(layout, num_sequences):
    """Count the bytes of tensors as wide as the states after a forward of blocks that are computed again, or are not.

    Each tensor once, and no parameter.
    """
    model = make_model()
    make_strategy(**layout).build(model)
    hidden, found = torch.randn(num_sequences, 32 // num_sequences, 32, requires_grad=True), []
    for recomputes in (True, False):
        if not recomputes:
            model.gradient_checkpointing_disable()
        else:
            model.activation_checkpointing_enable({"use_reentrant": False})
        output = model.model(inputs_embeds=hidden * 1, use_cache=False)
        # A thread of gloo lets the last tensors go a moment later.
        time.sleep(0.2)
        gc.collect()
        tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
        wide = {value.data_ptr(): value.nbytes for value in tensors if value.dim() == 3 and value.shape[-1] == 32}
        found.append(sum(wide.values()))
        del output
    return found


def beside_the_whole_and_without_shares():
    held = [[held_by_blocks({"sequence": is_shared}, number) for is_shared in (True, False)] for number in (1, 2)]
    return held, [differences_without_shares(*case) for case in WITH_DROPOUT]


def test_ranks_that_share_tokens_keep_less_and_drop_what_one_process_drops():
    half_of_states = SIZES["num_hidden_layers"] * 32 * 32 * 4 // 2
    for held, differences in run_ranks(beside_the_whole_and_without_shares, 2):
        for shared, whole in held:
            of_recomputed, of_kept = (more - less for more, less in zip(whole, shared, strict=True))
            # The input of each block; else what two norms keep, too, and what they give to the tensor regions.
            assert of_recomputed == half_of_states
            assert of_kept == 7 * half_of_states
        for states_are_alike, *relative in differences:
            assert states_are_alike == [True] * 6
            assert relative == pytest.approx([0, 0], abs=1e-5)


def with_shared_tokens(model_types):
    return try_types(model_types, tensor=2, sequence=True)


@pytest.mark.parametrize("model_types", [("qwen3",), many(("llama", "qwen2", "mistral"))])
def test_gradients_of_shared_tokens_are_those_of_the_whole_model(model_types):
    """Their small models were tried with an odd number of tokens, packed and masked."""
    for of_rank in run_ranks(with_shared_tokens, 2, model_types):
        for model_type, outcome in of_rank.items():
            assert (outcome.verdict, outcome.saved) == ("exact", ""), (model_type, outcome)
            assert "tokens are divided" in outcome.plan


def norms_of_parts_of_sequences():
    """As a plan may ask for; none of transformers' own does."""
    norms = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
    LlamaConfig.base_model_tp_plan = LlamaConfig.base_model_tp_plan | dict.fromkeys(norms, "sequence_parallel")
    return try_types(["llama"], tensor=2)["llama"]


@pytest.mark.many  # another wrong plan is above
def test_a_plan_with_norms_of_parts_of_sequences_gives_way_to_one_that_is_right():
    for outcome in run_ranks(norms_of_parts_of_sequences, 2):
        assert (outcome.verdict, outcome.plan) == ("exact", ALL_GATHERED)


UNEVEN = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 67}
"""No number of tensor ranks divides these heads and this vocabulary; layers in pairs still fit."""
NOTHING_FITS = UNEVEN | {"intermediate_size": 63, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("fields", "num_ranks", "layout"),
    [
        (UNEVEN, 1, {"tensor": 1}),
        many(UNEVEN, 4, {"tensor": 2, "sharding": "fsdp2"}),
        many(NOTHING_FITS, 4, {"tensor": 2, "sharding": "fsdp2"}),
    ],
)
def test_sizes_that_do_not_divide_train_as_one_process_and_resume_in_another_layout(
    tmp_path, tmp_path_factory, fields, num_ranks, layout
):
    folder, reference = train_single(tmp_path_factory, **fields)
    run_ranks(train, 2, tmp_path, {"tensor": 2}, None, fields, None, 2)
    resumed = layout, None, fields, tmp_path / "checkpoint-2"
    check(run_ranks(train, num_ranks, tmp_path, *resumed, group=num_ranks > 1)[0], reference, tmp_path, folder)


def counting_tensor_ranks():
    """The mistake of counting each rank of a group as one that has a loss of its own."""
    hfdist.Trainer.get_tp_size = lambda trainer: 1


@pytest.mark.many
def test_a_loss_that_counts_tensor_ranks_shows(single, tmp_path):
    _, (reference, _) = single
    ours, _ = run_ranks(train, 2, tmp_path, {"tensor": 2}, counting_tensor_ranks)[0]
    assert ours[0][1] == pytest.approx(2 * reference[0][1], rel=1e-3)


def counting_whole_parameters_twice():
    """The mistake of a norm in which each tensor rank counts what is whole on all."""
    ModelParts.counts = lambda parts, name, axes: True


def adding_up_whole_gradients():
    """The mistake of taking every gradient for a part."""
    reduce = ModelParts.reduce_gradients

    def spoilt(parts, model):
        parts._partial = frozenset(name for name, _ in model.named_parameters())
        reduce(parts, model)

    ModelParts.reduce_gradients = spoilt
    parallel_plans.check_plans = lambda *arguments: None


@pytest.mark.many
@pytest.mark.parametrize("spoil", [counting_whole_parameters_twice, adding_up_whole_gradients])
def test_a_wrong_norm_or_gradient_shows(single, tmp_path, spoil):
    _, (reference, _) = single
    ours, _ = run_ranks(train, 2, tmp_path, {"tensor": 2}, spoil)[0]
    # Five times the bound of the tests above.
    assert ours[0][1] > (1 + 5e-5) * reference[0][1]


def with_dropout(folder, layout):
    """Each rank's generators stand elsewhere, as after a checkpoint of another layout."""
    torch.manual_seed(dist.get_rank())
    trainer = make_trainer(folder, make_model(attention_dropout=0.5), {"save_strategy": "no"}, **layout)
    setup = trainer.engine.setup

    def apart(*prepared):
        torch.manual_seed(100 + dist.get_rank())
        return setup(*prepared)

    trainer.engine.setup = apart
    trainer.train()
    return find_differences(trainer.engine.whole_parameters()), torch.rand(3).tolist()


@pytest.mark.parametrize(("num_ranks", "layout"), [PLAIN[0], many(*PLAIN[1])])
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
    hooks = TrainerHooks(model=trainer.model, loss=trainer.weighted_loss.of)
    # All ranks of a group gather them.
    values = trainer.engine.forward(batch, lambda model, part: model(**part).logits, hooks)
    return [value.numpy() for value in values], make_model()(**batch).logits.detach().numpy()


def test_one_rank_of_a_group_has_logits(tmp_path):
    (first, whole), (second, _) = run_ranks(forward_values, 2, tmp_path)
    assert second == []
    assert abs(first[0] - whole).max() < 1e-5
