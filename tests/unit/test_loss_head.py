"""A model takes part in a loss of deferred logits only where that was tried, and DDP finds its tensors."""

import logging
import types

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from hfdist.config.composition.compose import compose_config
from hfdist.config.model import Loss
from hfdist.models.loss import LossHead, UntriedError, choose_loss, refuse_model
from hfdist.testing import run_ranks

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.arange(48).view(2, 24)


class OneWidth(LlamaForCausalLM):
    """Cannot be made small."""

    def __init__(self, config):
        assert config.hidden_size == 96, "only this width"
        super().__init__(config)


class Own(LlamaForCausalLM):
    """Computes its loss itself."""

    def finish(self, logits):
        return logits

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.finish(self.lm_head(self.model(input_ids).last_hidden_state))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)


class Insists(Own):
    def finish(self, logits):
        assert isinstance(logits, torch.Tensor), "no tensor"
        return logits


class Subtracts(Own):
    def finish(self, logits):
        return logits - 5.0


def config(loss):
    return compose_config([f"model.loss={loss}", "train.max_steps=100"])


def test_what_could_not_be_tried_is_taken_only_where_it_is_asked_for(caplog):
    model = OneWidth(LlamaConfig(**SIZES | {"hidden_size": 96}))
    with pytest.raises(UntriedError, match="only this width"):
        refuse_model(model)
    with caplog.at_level(logging.INFO, "hfdist"):
        assert choose_loss(config("auto"), model) is None
        assert choose_loss(config("chunked"), model).choice is Loss.chunked
    said = [record for record in caplog.records if "only this width" in record.message]
    assert [record.levelno for record in said] == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize(("kind", "why"), [(Insists, "no tensor"), (Subtracts, "__sub__"), (Own, None)])
def test_whatever_goes_wrong_with_deferred_logits_means_whole_ones(kind, why):
    reason = refuse_model(kind(LlamaConfig(**SIZES)))
    assert reason == (why and f"{kind.__name__} needs them whole ({why})")


def train_under_ddp():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    head, norms = LossHead(Loss.chunked), []
    for _ in range(2):
        model.zero_grad()
        with head.deferring(parallel):
            loss = ForCausalLMLoss(parallel(input_ids=TOKENS).logits, TOKENS, model.config.vocab_size)
        loss.backward()
        norms.append([float(p.grad.norm()) for p in model.parameters()])
    assert norms[0] == pytest.approx(norms[1])
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert norms[0] == pytest.approx([float(p.grad.norm()) for p in model.parameters()], rel=1e-4)


@pytest.mark.distributed
def test_ddp_that_looks_for_unused_parameters_finds_the_logits():
    run_ranks(train_under_ddp, 1)
