"""Greedy continuations by forwards of filled-up sequences are those of transformers' own generate."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import ConfigError
from hfdist.topology import Topology
from hfdist.trainer.evaluation.generation import Limits, continue_prompts, next_tokens

TINY = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 96, "initializer_range": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": 96, "initializer_range": 0.5},
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [4, 4]]


def make_model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY[kind])).eval()


def continued(model, prompts, rows_at_once=2, **limits):
    def forward(batch, function):
        with torch.no_grad():
            return [function(model, batch)]

    limits = Limits(**{"max_new_tokens": 12, "end_ids": frozenset(), "most_tokens": None} | limits)
    return continue_prompts(
        prompts, forward, limits, topology=Topology(), rows_at_once=rows_at_once, device=torch.device("cpu")
    )


def generated(model, prompt, num_tokens=12, end=None):
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", TINY)
def test_each_prompt_goes_on_as_it_does_alone(kind):
    model = make_model(kind)
    wanted = [generated(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS), "or the test would not see a mix-up"
    positions = 40 if kind == "gpt2" else None
    for rows_at_once in (1, 3, 8):
        assert continued(model, PROMPTS, rows_at_once, most_tokens=positions) == wanted


def test_an_end_token_ends_one_row_and_is_left_out():
    model = make_model("llama")
    whole = generated(model, PROMPTS[0])
    end = whole[5]
    first = whole.index(end)
    rows = continued(model, PROMPTS, end_ids=frozenset({end}))
    assert rows[0] == whole[:first]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        assert row == [token for token in generated(model, prompt, end=end) if token != end]


def test_a_prompt_that_is_too_long_loses_its_beginning():
    model = make_model("gpt2")
    long = [(7 * place) % 96 for place in range(60)]
    assert continued(model, [long], most_tokens=40) == [generated(model, long[-28:])]


def test_no_room_for_a_prompt_is_said():
    with pytest.raises(ConfigError, match="no room for a prompt") as caught:
        Limits(max_new_tokens=40, end_ids=frozenset(), most_tokens=40).room()
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
