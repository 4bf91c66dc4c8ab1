"""The loss of rows that ranks share: the sum and every gradient are those of one process, tied or not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hfdist.models import shared_rows
from hfdist.models.chunked_loss import ChunkedLoss
from hfdist.models.lazy_logits import deferring
from hfdist.testing import RankFailed, run_ranks

pytestmark = pytest.mark.distributed

VOCABULARY, WIDTH, ROWS = 61, 8, 37


def loss_and_gradients(group, tied):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=not tied)
    if tied:
        head.weight = embedding.weight
    tokens = torch.randint(0, VOCABULARY, (1, ROWS))
    targets = tokens.roll(1).flatten()
    targets[:9] = -100
    chunked = ChunkedLoss(torch.device("cpu"), chunk_logits=5 * VOCABULARY)
    loss = chunked if group is None else shared_rows.share_rows(chunked, group)
    with deferring(head, VOCABULARY, loss):
        logits = head(embedding(tokens).tanh())
        # As the Trainer's loss: a sum, divided by a number of the global batch.
        value = functional.cross_entropy(logits.view(-1, VOCABULARY), targets, reduction="sum") / 53
        (3 * value).backward()
    parameters = [embedding.weight, *head.parameters()]
    for parameter in parameters if group is not None else ():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
    return value.detach(), [parameter.grad for parameter in parameters]


def compare(tied):
    value, gradients = loss_and_gradients(dist.group.WORLD, tied)
    whole, expected = loss_and_gradients(None, tied)
    assert torch.allclose(value, whole, rtol=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


@pytest.mark.parametrize(("num_ranks", "tied"), [(2, False), (3, True)])
def test_the_sum_and_all_gradients_are_those_of_one_process(num_ranks, tied):
    run_ranks(compare, num_ranks, tied)


def test_a_factor_that_is_left_out_shows(monkeypatch):
    monkeypatch.setattr(shared_rows._Total, "backward", staticmethod(lambda ctx, of_total: (of_total, None)))
    with pytest.raises(RankFailed):
        run_ranks(compare, 2, True)
