"""Plans of tasks that are not of next tokens: what a step reads, computes and sends."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.planning.planned_architecture import find_planned_architecture
from hfdist.planning.row_sizes import RowSizes, row_sizes
from hfdist.planning.searching.short_traces import measure_constants
from hfdist.planning.tracing.memory import trace_rank
from tests.marks import many

COMMON = ("model.tokenizer.vocab_size=257", "data.sequence_length=64", "train.micro_batch_size=2",
          "train.global_batch_size=4", "data=files", "data.sources.files.path=/dev/null")  # fmt: skip
SMALL = {"vocab_size": 257, "pad_token_id": 0}
FIELDS = {
    "bert": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 64},
    "t5": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 32},
}  # fmt: skip


def make(task, kind="llama", *overrides):
    config = compose_config(["model=tiny", f"task={task}", *COMMON, *overrides], name="tune")
    if kind != "llama":
        config.model.type, config.model.config = kind, FIELDS[kind] | SMALL
    return config


@pytest.mark.parametrize(
    ("task", "overrides", "is_apart", "wanted"),
    [
        ("classify", ("data.texts.max_tokens=48",), True, RowSizes(tokens=48)),
        ("rerank", (), True, RowSizes(rows=2, tokens=64)),
        ("embed", (), False, RowSizes(tokens=64, texts=2, text_tokens=32)),
        ("embed", ("data.texts.max_tokens=12",), True, RowSizes(rows=4, tokens=12, texts=4, text_tokens=12)),
        ("mlm", (), True, RowSizes(tokens=64)),
        ("seq2seq", ("data.pairs.max_target_tokens=16",), True, RowSizes(tokens=48, targets=16)),
        # 10 of 64 tokens in 3 spans, a sentinel each on both sides, and two ends.
        ("span_corruption", (), True, RowSizes(tokens=58, targets=14)),
    ],
)
def test_rows_are_as_long_as_the_config_lets_them_be(task, overrides, is_apart, wanted):
    assert row_sizes(make(task, "llama", *overrides), is_apart=is_apart) == wanted


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("embed", "bert"),
        ("seq2seq", "t5"),
        many("embed", "llama"),
        many("classify", "llama"),
        many("token_classify", "bert"),
        many("rerank", "bert"),
        many("reward", "llama"),
        many("mlm", "bert"),
        many("span_corruption", "t5"),
    ],
)
def test_a_step_has_the_flops_that_a_trace_counts(task, kind):
    config = make(task, kind)
    architecture = find_planned_architecture(config)
    traced = trace_rank(config, architecture, world_size=1, rank=0)
    [stage] = traced.costs.stages
    model = measure_constants(config, architecture)
    planned = model.flops_per_sequence * config.train.micro_batch_size
    forwards = 2 if task == "embed" else 1
    # The backward of the first layers needs no gradient by tokens, and kernels of attention do more.
    assert stage.forward.flops == pytest.approx(forwards * planned / 3, rel=0.15)
    assert stage.backward.flops == pytest.approx(2 * planned / 3, rel=0.15)
    assert model.sizes[1].embeddings == (2 * 4 * model.sizes[1].hidden if task == "embed" else 0)
    assert model.sizes[1].passes == forwards
