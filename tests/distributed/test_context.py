"""Context parallelism beyond the numbers of test_layouts.py: shapes of batches, what ranks send, what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hfdist
from hfdist.config.strategy import ContextMethod
from hfdist.errors import ConfigError
from hfdist.strategies import context, context_check
from hfdist.strategies.context import ContextParallel
from hfdist.strategies.context_check import make_context_parallel
from hfdist.testing import forget_parent, run_ranks
from tests.distributed.trainers import GLOBAL_BATCH, NoLossKwargs, history, make_arguments, make_model
from tests.marks import many
from tests.zoo import sharding
from tests.zoo.models import make_model as make_small
from tests.zoo.models import tiny_config, tiny_model
from tests.zoo.sharding import share_types

pytestmark = pytest.mark.distributed


def make_strategy(**layout):
    return hfdist.make_strategy(global_batch_size=GLOBAL_BATCH, micro_batch_size=2, **layout)


def odd_items(num_items=GLOBAL_BATCH * 2):
    """Sequences of many lengths, which no number of ranks divides."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 64, (3 + 5 * number % 17,), generator=generator) for number in range(num_items)]
    return [{"input_ids": row, "labels": torch.where(row % 5 == 0, -100, row)} for row in rows]


def collate(items, *, side, with_mask):
    width = max(len(item["input_ids"]) for item in items)

    def padded(row, filler):
        sizes = (width - len(row), 0) if side == "left" else (0, width - len(row))
        return nn.functional.pad(row, sizes, value=filler)

    batch = {name: torch.stack([padded(item[name], -100 * (name == "labels")) for item in items]) for name in items[0]}
    if with_mask:
        batch["attention_mask"] = torch.stack([padded(torch.ones_like(item["input_ids"]), 0) for item in items])
    return batch


def train_padded(folder, layout, side, with_mask):
    strategy = make_strategy(**layout)
    arguments = make_arguments(folder, strategy, max_steps=2, per_device_eval_batch_size=3, remove_unused_columns=False)
    items = odd_items()

    def collator(rows):
        return collate(rows, side=side, with_mask=with_mask)

    trainer = hfdist.Trainer(
        make_model(), arguments, strategy=strategy, train_dataset=items, eval_dataset=items[:7], data_collator=collator
    )
    trainer.train()
    return history(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("layout", "side", "with_mask"),
    [({"context_method": "gather"}, "left", True), many({"sharding": "fsdp2"}, "right", False)],
)
def test_rows_of_any_length_and_padding(tmp_path, layout, side, with_mask):
    expected, expected_eval = run_ranks(train_padded, 1, tmp_path, {}, side, with_mask)[0]
    for steps, eval_loss in run_ranks(train_padded, 2, tmp_path, {"context": 2} | layout, side, with_mask):
        assert torch.tensor(steps) == pytest.approx(torch.tensor(expected), rel=1e-5)
        assert eval_loss == pytest.approx(expected_eval, rel=1e-6)


# Learned positions; windows and sinks.
FAMILIES = ("gpt2", "gpt_oss")
# The last has keys of another size than values.
MORE_FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "cohere2", "phi3", "deepseek_v3")


@pytest.mark.parametrize("families", [FAMILIES, many(MORE_FAMILIES)])
def test_families_train_as_on_one_process(families):
    """By gathering, on a number of ranks that divides nothing; the zoo has two ranks, and the method that fits."""
    for tried in run_ranks(share_types, 3, families, ContextMethod.gather):
        assert {name: one for name, one in tried.items() if one.verdict != "exact"} == {}


ROPES = {
    "dynamic": {"factor": 2.0, "rope_theta": 1e2},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e2, "factor": 4.0},
}


def stretched(rope_type):
    """A model whose frequencies change at 12 positions, of which the first rank of two sees only 8 or so."""
    config = tiny_config("llama")
    config.max_position_embeddings = 12
    config.rope_parameters = {"rope_type": rope_type, "original_max_position_embeddings": 12, **ROPES[rope_type]}
    return make_small("llama", config).train()


def train_stretched(rope_type):
    sharding.tiny_model = lambda _: stretched(rope_type)
    sharding.packed = lambda batch: {name: batch[name] for name in ("input_ids", "labels")}
    return share_types(["llama"], ContextMethod.auto)["llama"]


@pytest.mark.parametrize("rope_type", ["dynamic", many("longrope")])
def test_frequencies_depend_on_the_whole_sequence(rope_type):
    for outcome in run_ranks(train_stretched, 2, rope_type):
        assert outcome.verdict == "exact", outcome


@pytest.mark.many  # the test of the test
@pytest.mark.parametrize("rope_type", ROPES)
def test_frequencies_of_the_positions_of_one_rank_are_others(rope_type, monkeypatch):
    monkeypatch.setattr(context, "_DEPENDENT_ON_LENGTH", set())
    assert run_ranks(train_stretched, 2, rope_type)[0].verdict != "exact"


def refusals():
    found = {}
    for name in ("mamba2", "bloom"):
        with pytest.raises(ConfigError) as error:
            make_context_parallel(tiny_model(name), dist.group.WORLD, ContextMethod.auto)
        found[name] = error.value.found
    for model, method in (
        (tiny_model("gpt_oss"), ContextMethod.ulysses),
        (make_model(), ContextMethod.ulysses),
        (NoLossKwargs(), ContextMethod.auto),
    ):
        with pytest.raises(ConfigError) as error:
            make_context_parallel(model, dist.group.WORLD, method)
        found[f"{type(model).__name__} {method.value}"] = error.value.found
    return found


def test_what_needs_more_than_attention_gives_is_refused():
    found = run_ranks(refusals, 2)
    assert found[0] == found[1]
    assert all("differs by" in found[0].pop(name) for name in ("mamba2", "bloom"))
    assert found[0] == {
        "GptOssForCausalLM ulysses": "sinks",
        "LlamaForCausalLM ulysses": "num_key_value_heads: 1",
        "NoLossKwargs auto": "a model that is not one of transformers",
    }


def test_a_batch_that_holds_more_than_a_value_for_each_token_is_refused():
    context = ContextParallel.__new__(ContextParallel)
    ids = torch.arange(8).view(2, 4)
    for name, value in (
        ("token_type_ids", ids),
        ("attention_mask", torch.ones(2, 1, 4, 4)),
        ("position_ids", ids.expand(3, 2, 4)),
    ):
        with pytest.raises(ConfigError, match=f"{name} of shape"):
            context.sharded({"input_ids": ids, "labels": ids, name: value})


REFUSED = [
    ({"compute_loss_func": print}, "compute_loss_func"),
    ({"arguments": {"label_smoothing_factor": 0.1}}, "args.label_smoothing_factor"),
    ({"arguments": {"average_tokens_across_devices": False}}, "args.average_tokens_across_devices"),
    ({"compute_metrics": print}, "make_strategy(pipeline, context)"),
    ({}, "make_strategy(pipeline, context)"),
]


def refused_places(folder):
    """Where each training of `REFUSED` was refused."""
    found = []
    for given, _ in REFUSED:
        forget_parent()
        strategy = make_strategy(context=2)
        with pytest.raises(ConfigError) as error:
            arguments = make_arguments(folder, strategy, **given.get("arguments", {}))
            more = {name: value for name, value in given.items() if name != "arguments"}
            trainer = hfdist.Trainer(make_model(), arguments, strategy=strategy, train_dataset=odd_items(), **more)
            trainer.predict(odd_items(2))
        found.append(error.value.where)
    return found


def test_what_looks_at_whole_sequences_is_refused(tmp_path):
    assert run_ranks(refused_places, 2, tmp_path) == [[where for _, where in REFUSED]] * 2


def see_through(model_type):
    """The model's mask without its documents."""
    context_check.keeps_documents_apart = lambda model: False
    return share_types([model_type], ContextMethod.auto)[model_type]


def without_shift(model_type):
    share = ContextParallel._shard

    def unshifted(self, batch):
        shared, sequence = share(self, batch)
        return shared | {"shift_labels": shared["labels"]}, sequence

    ContextParallel._shard = unshifted
    return share_types([model_type], ContextMethod.gather)[model_type]


@pytest.mark.parametrize("spoil", [see_through, without_shift])
def test_the_check_of_a_small_model_finds_mistakes(spoil):
    for outcome in run_ranks(spoil, 2, "llama"):
        assert "differs by" in outcome.reason
