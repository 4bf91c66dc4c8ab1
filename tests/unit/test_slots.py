"""Rows in slots: the tokens of `generate` for all that a model keeps, in any order, and each prompt is read once."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hfdist.models.cache_check import find_cache_problem
from hfdist.models.slot_cache import SlotCache, _Keys
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import can_use_cache, continue_rows
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampling, TokenLogProbabilities, make_choice
from hfdist.trainer.generation.score import LIKELIEST
from hfdist.trainer.generation.slots import Slots
from tests.marks import many
from tests.unit.test_evaluators import make_model
from tests.zoo.models import tiny_model

PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [4, 4], [9], [9], [8, 3, 8, 3, 8]]
NUM_TOKENS = 14


def answer(model, prompts=PROMPTS, seeds=None, slots=3, record=None, **limits):
    def forward(batch, function, *, as_whole=False):
        with torch.no_grad():
            return [function(model, batch)]

    choice = LIKELIEST if seeds is None else make_choice(seeds, Sampling(temperature=2.0))
    limits = {"max_new_tokens": NUM_TOKENS, "end_ids": frozenset(), "most_tokens": None} | limits
    return continue_rows(
        prompts,
        forward,
        GenerationLimits(**limits),
        topology=Topology(),
        rows_at_once=slots,
        uses_cache=True,
        choice=choice if record is None else replace(choice, score=record.recording(choice.score)),
    )


@pytest.mark.parametrize(
    "kind",
    # Windows shorter than the answers, positions by row, soft caps, experts, narrow values, keys of other blocks, and
    # states of convolutions and of linear attention.
    [
        *("mistral", "gpt2", "gemma2", "mixtral", "deepseek_v3", "gemma3n_text", "lfm2", "qwen3_next"),
        *map(many, ("llama", "qwen2", "qwen3", "gemma3_text", "olmo2")),
    ],
)
def test_slots_give_the_tokens_of_generate(kind):
    # Of gemma3n's blocks, half take keys of others.
    model = tiny_model(kind, 6 if kind == "gemma3n_text" else 4).eval()
    assert can_use_cache(model, Topology())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.generation_config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    alone = {
        prompt: model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in {*map(tuple, PROMPTS)}
    }
    wanted = [alone[tuple(prompt)] for prompt in PROMPTS]
    assert len({tuple(row) for row in wanted}) > 3, "or the test would not see a mix-up"
    assert answer(model) == wanted


@pytest.mark.parametrize("kind", ["roberta", "mamba", "deepseek_v32"])
def test_models_that_read_what_pads_rows_or_keep_something_else_do_without(kind, caplog):
    model = tiny_model(kind)
    assert find_cache_problem(model)
    assert not can_use_cache(model, Topology())
    assert "without a cache" in caplog.text


def test_a_cache_that_mixes_rows_up_is_noticed(monkeypatch):
    monkeypatch.setattr(_Keys, "move_rows", lambda *_: None)
    assert "logits differ" in find_cache_problem(make_model("llama"))


def test_neither_the_order_nor_the_slots_change_an_answer():
    model, seeds = make_model("llama"), [3, 2**40, 7, 8, 9, 10, 11]
    ends = frozenset(range(30))
    wanted = answer(model, seeds=seeds, slots=7, end_ids=ends)
    assert len({len(row) for row in wanted}) > 3
    for order, slots in (([0, 1, 2, 3, 4, 5, 6], 1), ([6, 2, 4, 0, 1, 5, 3], 2), ([3, 5, 1, 6, 0, 2, 4], 4)):
        found = answer(model, [PROMPTS[row] for row in order], [seeds[row] for row in order], slots, end_ids=ends)
        assert found == [wanted[row] for row in order]


def test_rows_that_end_at_once_leave_their_slots():
    model = make_model("llama")
    first = {row[0] for row in answer(model)}
    assert answer(model, end_ids=frozenset(first)) == [row[:1] for row in answer(model)]
    assert answer(model, max_new_tokens=1) == [row[:1] for row in answer(model)]


def test_log_probabilities_belong_to_their_rows():
    model, seeds = make_model("llama"), range(len(PROMPTS))
    drawn = TokenLogProbabilities(1.0)
    rows = answer(model, seeds=seeds, record=drawn, end_ids=frozenset(range(30)))
    for prompt, tokens, found in zip(PROMPTS, rows, drawn.log_probabilities(rows), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)


def test_a_prompt_of_several_rows_is_read_once():
    model, num_read = make_model("llama"), []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: num_read.append(inputs[0].numel()))
    group = [list(range(10, 40))] * 5 + [list(range(40, 65))] * 3
    answer(model, group, seeds=range(8), slots=2, max_new_tokens=3)
    # Each answer's last token is not read.
    assert sum(num_read) == 30 + 25 + 8 * 2


def test_prompts_that_come_again_later_are_not_kept(monkeypatch):
    held, fill = [], Slots._fill

    def noted(slots, num_free):
        fill(slots, num_free)
        held.append(len(slots._read))

    monkeypatch.setattr(Slots, "_fill", noted)
    model, prompts = make_model("llama"), [[first, 9] for first in range(10)]
    assert answer(model, prompts * 2) == answer(model, prompts) * 2
    assert max(held) == 0


def test_factors_of_longer_rows_do_not_keep_a_model_from_a_cache():
    positions = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    factors = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    tokens = {"vocab_size": 256, "pad_token_id": 0}
    config = AutoConfig.for_model("phi3", **sizes, **tokens, **positions, rope_parameters=scaling)
    assert find_cache_problem(AutoModelForCausalLM.from_config(config)) is None


def test_the_cache_is_as_long_as_the_longest_row_that_lives(monkeypatch):
    widths, narrow = [], SlotCache.narrow

    def noted(cache, num_columns):
        narrow(cache, num_columns)
        widths.append(max(layer.keys.shape[2] for layer in cache.layers))

    monkeypatch.setattr(SlotCache, "narrow", noted)
    model = make_model("llama")
    answer(model, [[5, 6, 7]] * 12, seeds=range(12), slots=2, max_new_tokens=60)
    assert len(widths) > 300
    assert max(widths) < 3 + 60 + 64
