"""Sampled tokens have the right distribution, and depend on nothing but weights, prompt and seed."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hfdist.errors import ConfigError
from hfdist.topology import Topology
from hfdist.trainer.generation.gumbel import gumbel_noise, philox, split_seeds
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampler, Sampling, perturb
from tests.unit.test_evaluators import PROMPTS, make_model

SEEDS = [3, 2**40 + 3, 2**64 - 1, 7]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_numbers(counter, key, expected):
    even, odd, key = (torch.tensor(words)[:, None, None] for words in (counter[::2], counter[1::2], key))
    assert tuple(philox(even, odd, key).flatten().tolist()) == expected


def test_noise_depends_on_seed_step_and_token_alone():
    noise = gumbel_noise(split_seeds(SEEDS), 5, 10)
    assert noise.dtype == torch.float32
    for row, seed in zip(noise, SEEDS, strict=True):
        assert torch.equal(gumbel_noise(split_seeds([seed]), 5, 7)[0], row[:7])
    others = gumbel_noise(split_seeds(SEEDS), 6, 10)
    assert len(set(torch.cat([noise, others]).flatten().tolist())) == 80, "all numbers differ"


def p_value(counts, probabilities):
    """Of Pearson's chi-square test; what has no probability must not occur."""
    expected = probabilities.double() * counts.sum()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0].double(), expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2).item()


LOGITS = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, 1.5, -2.0, 0.1])


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(), []),
        (Sampling(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (Sampling(temperature=2, top_k=3), [TemperatureLogitsWarper(2.0), TopKLogitsWarper(3)]),
        (Sampling(top_p=0.7), [TopPLogitsWarper(0.7)]),
        (
            Sampling(temperature=1.5, top_k=5, top_p=0.8),
            [TemperatureLogitsWarper(1.5), TopKLogitsWarper(5), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_tokens_have_the_probabilities_of_transformers_warpers(sampling, warpers):
    num_seeds, num_steps, num_tokens = 500, 80, len(LOGITS)
    logits = LOGITS.repeat(num_seeds, 1)
    batch = {"input_ids": torch.zeros(num_seeds, 1, dtype=torch.long), "keys": split_seeds(range(num_seeds))}
    drawn = torch.stack(
        [perturb(logits.clone(), batch, step, warpers=sampling.warpers()).argmax(-1) for step in range(num_steps)]
    )
    probabilities = LogitsProcessorList(warpers)(None, LOGITS[None].clone()).softmax(-1)[0]
    assert p_value(torch.bincount(drawn.flatten(), minlength=num_tokens), probabilities) > 0.001
    # A token tells nothing of the next one, or of the next seed's.
    pairs = torch.outer(probabilities, probabilities).flatten()
    for first, second in ((drawn[::2], drawn[1::2]), (drawn[:, ::2], drawn[:, 1::2])):
        counts = torch.bincount((first * num_tokens + second).flatten(), minlength=num_tokens**2)
        assert p_value(counts, pairs) > 0.001


def sampled(model, prompts=PROMPTS, seeds=SEEDS, rows_at_once=4, uses_cache=True, sampling=None, **limits):
    def forward(batch, function, *, as_whole=False):
        with torch.no_grad():
            return [function(model, batch)]

    sampler = Sampler(
        limits=GenerationLimits(**{"max_new_tokens": 12, "end_ids": frozenset(), "most_tokens": None} | limits),
        sampling=sampling or Sampling(temperature=3.0, top_k=20, top_p=0.95),
        topology=Topology(),
        uses_cache=uses_cache,
    )
    return [drawn.tokens for drawn in sampler.draw(prompts, seeds, forward, rows_at_once=rows_at_once)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_batches_padding_and_the_cache_change_nothing(kind):
    model = make_model(kind)
    positions = 40 if kind == "gpt2" else None
    alone = [
        sampled(model, [prompt], [seed], most_tokens=positions)[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    for rows_at_once, uses_cache in ((4, True), (3, True), (1, False), (4, False)):
        assert sampled(model, rows_at_once=rows_at_once, uses_cache=uses_cache, most_tokens=positions) == alone
    assert len({row[0] for row in sampled(model, [PROMPTS[0]] * 4)}) > 1, "seeds matter"
    assert sampled(model, sampling=Sampling(temperature=1.0)) != alone


@pytest.mark.parametrize("uses_cache", [True, False])
def test_an_end_token_is_the_last_of_its_completion(uses_cache):
    model = make_model("llama")
    whole = sampled(model)
    ends = frozenset({whole[0][4], whole[2][7]})
    ended = sampled(model, end_ids=ends, uses_cache=uses_cache)
    for row, tokens in zip(ended, whole, strict=True):
        places = [place for place, token in enumerate(tokens) if token in ends]
        assert row == tokens[: places[0] + 1 if places else None]
    assert len({len(row) for row in ended}) > 1


def test_no_room_is_said_by_the_key_that_was_set():
    limits = {"max_new_tokens": 40, "most_tokens": 40, "where": "a.key"}
    with pytest.raises(ConfigError, match="no room for a prompt") as caught:
        sampled(None, **limits)
    assert caught.value.where == "a.key"
