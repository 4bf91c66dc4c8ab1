"""What an evaluation does besides the loss: continuations, samples, named metrics; and when losses end a run."""

import math
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfdist
from hfdist.config.data import ChatConfig
from hfdist.config.ranges import LIMIT
from hfdist.config.run import Chat, EvaluateConfig
from hfdist.errors import ConfigError
from hfdist.models.tokenizer import train_bpe
from hfdist.topology import Topology
from hfdist.trainer.checkpointing.log_history import NUM_ENTRIES, drop_old, newest_entries, newest_losses
from hfdist.trainer.evaluation.evaluators import num_without_improvement
from hfdist.trainer.evaluation.generation import (
    GROUP,
    compute,
    encode_prompts,
    exact_match,
    load_metrics,
    word_f1,
)
from hfdist.trainer.generation.continuation import next_tokens
from hfdist.trainer.generation.greedy import continue_prompts
from hfdist.trainer.generation.limits import GenerationLimits
from tests.packages import install_package


@pytest.mark.parametrize(
    ("losses", "min_delta", "expected"),
    [
        ([], 0.0, 0),
        ([3.0], 0.0, 0),
        ([3.0, 2.0, 1.0], 0.0, 0),
        ([3.0, 2.0, 2.0, 2.5], 0.0, 2),
        ([3.0, 2.0, 2.5, 1.9], 0.0, 0),
        ([3.0, 2.5, 2.25], 0.5, 1),
        # Two small steps are a large one: the best stays where it was until then.
        ([3.0, 2.75, 2.5], 0.5, 0),
        ([math.nan, 3.0, math.nan, math.inf], 0.0, 2),
        ([math.nan, math.nan], 0.0, 2),
    ],
)
def test_evaluations_without_an_improvement_are_counted(losses, min_delta, expected):
    assert num_without_improvement(losses, min_delta) == expected


def test_the_history_of_a_run_and_of_a_checkpoint_is_bounded_and_decides_as_the_whole_does():
    whole, held, longest = [], [], 0
    for step in range(6 * NUM_ENTRIES):
        whole.append({"step": step, "eval_loss" if step % 5 == 0 else "loss": float(step % 7)})
        held.append(whole[-1])
        drop_old(held)
        longest = max(longest, len(held))
    assert longest < 4 * NUM_ENTRIES
    kept = newest_entries(held)
    for key in ("loss", "eval_loss"):
        assert [entry for entry in kept if key in entry] == [entry for entry in whole if key in entry][-NUM_ENTRIES:]
    assert [entry["step"] for entry in kept] == sorted(entry["step"] for entry in kept)
    assert newest_losses(kept) == newest_losses(held) == newest_losses(whole)
    assert newest_entries(kept) == kept
    assert newest_entries(whole[:9]) == whole[:9]


def test_patience_fits_into_what_a_checkpoint_holds():
    (limit,) = [field.metadata[LIMIT] for field in fields(EvaluateConfig) if field.name == "patience"]
    # The first of those that are held counts as an improvement.
    assert limit.accepts(NUM_ENTRIES - 1)
    assert not limit.accepts(NUM_ENTRIES)


TINY = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 96, "initializer_range": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": 96, "initializer_range": 0.5},
    # Windows shorter than the texts, positions in the attention alone, and a state in place of keys and values.
    "gemma2": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "head_dim": 16, "num_key_value_heads": 1, "vocab_size": 96, "sliding_window": 8,
               "initializer_range": 0.5},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "initializer_range": 0.5},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "initializer_range": 0.5},
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [4, 4]]


def make_model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY[kind])).eval()


def continued(model, prompts, rows_at_once=2, uses_cache=True, **limits):
    def forward(batch, function, *, as_whole=False):
        with torch.no_grad():
            return [function(model, batch)]

    limits = GenerationLimits(**{"max_new_tokens": 12, "end_ids": frozenset(), "most_tokens": None} | limits)
    return continue_prompts(
        prompts, forward, limits, topology=Topology(), rows_at_once=rows_at_once, uses_cache=uses_cache
    )


def generated(model, prompt, num_tokens=12, end=None):
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


# A Mamba has no keys, and a cache of slots is none for it.
@pytest.mark.parametrize(
    ("kind", "uses_cache"), [(kind, own) for kind in TINY for own in (True, False) if not own or kind != "mamba"]
)
def test_each_prompt_goes_on_as_it_does_alone(kind, uses_cache):
    model = make_model(kind)
    wanted = [generated(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS), "or the test would not see a mix-up"
    positions = 40 if kind == "gpt2" else None
    for rows_at_once in (1, 3, 8):
        assert continued(model, PROMPTS, rows_at_once, uses_cache, most_tokens=positions) == wanted


def test_no_prompts_go_on_as_nothing():
    assert continued(make_model("llama"), []) == []


@pytest.mark.parametrize("uses_cache", [True, False])
def test_an_end_token_ends_one_row_and_is_left_out(uses_cache):
    model = make_model("llama")
    whole = generated(model, PROMPTS[0])
    end = whole[5]
    first = whole.index(end)
    rows = continued(model, PROMPTS, uses_cache=uses_cache, end_ids=frozenset({end}))
    assert rows[0] == whole[:first]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert row == [token for token in generated(model, prompt, end=end) if token != end]


def test_a_prompt_that_is_too_long_loses_its_beginning():
    model = make_model("gpt2")
    long = [(7 * place) % 96 for place in range(60)]
    assert continued(model, [long], most_tokens=40) == [generated(model, long[-28:])]


def test_no_room_for_a_prompt_is_said():
    with pytest.raises(ConfigError, match="no room for a prompt") as caught:
        GenerationLimits(max_new_tokens=40, end_ids=frozenset(), most_tokens=40).room()
    assert caught.value.where == "evaluate.max_new_tokens"


class AllLogits(torch.nn.Module):
    """A model that gives logits of all places whatever it is asked for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, logits_to_keep=0):
        return {"logits": self.model(input_ids=input_ids).logits}


def test_models_that_keep_all_logits_give_the_same():
    model = make_model("llama")
    batch = {"input_ids": torch.tensor([[5, 6, 7, 0], [9, 0, 0, 0]]), "last": torch.tensor([2, 0])}
    assert next_tokens(AllLogits(model), batch).tolist() == next_tokens(model, batch).tolist()


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)

PLAIN = ChatConfig()


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["def add(a, b): return a + b"] * 4, 300)


def texts(tokenizer, *prompts, chat, rendering=PLAIN):
    return [tokenizer.decode(ids) for ids in encode_prompts(tokenizer, prompts, chat, rendering)]


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def test_text_is_text_where_there_is_no_template(tokenizer):
    assert texts(tokenizer, "def a", "x", chat=Chat.auto) == ["def a", "x"]


def test_a_template_makes_a_prompt_of_a_message(chatting):
    assert texts(chatting, "hello", chat=Chat.auto) == ["<user>hello<answer>"]
    assert texts(chatting, "hello", chat=Chat.always) == ["<user>hello<answer>"]
    assert texts(chatting, "hello", chat=Chat.never) == ["hello"]


def test_a_prompt_is_rendered_as_the_conversations_are(chatting):
    chatting.chat_template = TEMPLATE + "{{ mood }}"
    rendering = ChatConfig(system="Be brief.", template_arguments={"mood": "!"})
    assert texts(chatting, "hello", chat=Chat.auto, rendering=rendering) == ["<system>Be brief.<user>hello<answer>!"]


def test_a_template_that_is_missing_is_said(tokenizer):
    with pytest.raises(ConfigError, match="no chat template") as caught:
        encode_prompts(tokenizer, ["a"], Chat.always, PLAIN)
    assert caught.value.where == "evaluate.chat"


def test_a_template_that_refuses_a_prompt_is_said(chatting):
    chatting.chat_template = "{{ raise_exception('a system message first') }}"
    with pytest.raises(ConfigError, match="a system message first") as caught:
        encode_prompts(chatting, ["a"], Chat.auto, PLAIN)
    assert (caught.value.where, caught.value.hint) == ("evaluate.prompts", "evaluate.chat=never")


SOURCE = """
import random, numpy, torch
def length(generations):
    random.random(), numpy.random.rand(), torch.rand(1)
    return {"characters": sum(len(one.text) for one in generations), "count": len(generations)}
def fails(generations):
    raise RuntimeError("no such thing")
NUMBER = 3
"""


def generations(*pairs):
    return [hfdist.Generation(prompt="p", text=text, reference=reference) for text, reference in pairs]


@pytest.fixture
def package(tmp_path, monkeypatch):
    return install_package(
        tmp_path, monkeypatch, "toymetrics", SOURCE, GROUP, length="length", number="NUMBER", gone="nothing"
    )


def test_the_built_in_ones():
    assert exact_match(generations((" a b\n", "a b"), ("a", "b"))) == 0.5
    assert word_f1(generations(("a b", "b a"), ("a", "b"), ("", ""), ("a a b", "a c"))) == (1 + 0 + 1 + 0.4) / 4


def test_a_metric_of_an_installed_package_is_found(package):
    metric = load_metrics(["exact_match", "length"])["length"]
    assert compute("length", metric, generations(("abc", ""))) == {"length_characters": 3.0, "length_count": 1.0}


def test_a_metric_does_not_touch_the_generators_of_the_training(package):
    metric = load_metrics(["length"])["length"]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    wanted = random.random(), np.random.rand(), torch.rand(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    compute("length", metric, generations(("a", "b")))
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("exact_macth", "no installed package offers", "evaluate.metrics=[exact_match]"),
        ("lenght", "no installed package offers", "evaluate.metrics=[length]"),
        ("os.system", "no installed package offers", "entry point"),
        ("number", "is no function", ""),
        ("gone", "cannot be imported: AttributeError", ""),
    ],
)
def test_what_cannot_be_used_is_said(package, name, what, hint):
    with pytest.raises(ConfigError, match=what) as caught:
        load_metrics([name])
    assert caught.value.where == "evaluate.metrics"
    assert hint in str(caught.value.hint)


def test_two_packages_with_one_name_are_told_apart_by_nobody(package, tmp_path, monkeypatch):
    install_package(tmp_path / "other", monkeypatch, "othermetrics", SOURCE, GROUP, length="length")
    with pytest.raises(ConfigError, match="several installed packages") as caught:
        load_metrics(["length"])
    assert caught.value.found == "length: othermetrics:length, toymetrics:length"
