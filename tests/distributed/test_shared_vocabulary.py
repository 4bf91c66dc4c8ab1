"""An embedding and a head whose rows lie on several ranks: the loss and every gradient are those of one process."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hfdist.models.loss import shared_vocabulary
from hfdist.models.loss.chunked import ChunkedLoss
from hfdist.models.loss.lazy_logits import deferring, sum_divergences, teacher_rows
from hfdist.models.loss.teacher_rows import TopRows
from hfdist.strategies.tensor import linear
from hfdist.strategies.tensor.linear import GATHERED, LOOKED_UP
from hfdist.strategies.tensor.plan import _split_layers
from hfdist.testing import RankFailed, run_ranks
from hfdist.tune.kept_teacher import likeliest

pytestmark = pytest.mark.distributed

VOCABULARY, WIDTH, ROWS, PADDING = 61, 8, 37, 3
"""No number of ranks divides this vocabulary."""

STEPS = {
    "none": lambda logits: logits,
    "cap": lambda logits: torch.tanh(logits.float() / 2) * 2,
    "bias of tokens": lambda logits: logits * 0.5 + torch.linspace(-1, 1, VOCABULARY)[None],
}


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def get_output_embeddings(self):
        return self.head


def run(tied, step, smoothing, beta=None, top=None, *, divides, defers):
    """`beta`: of a divergence from a teacher, in place of the cross entropy; `top`: likeliest tokens that are known."""
    torch.manual_seed(0)
    model = Model(tied)
    tokens = torch.randint(0, VOCABULARY, (1, ROWS))
    tokens[0, 5] = PADDING
    targets = tokens.roll(1).flatten()
    targets[:9] = -100
    taught = torch.randn(1, ROWS, VOCABULARY + 3)
    layers = {"embedding": LOOKED_UP, "head": GATHERED}
    shards = _split_layers(model, dist.group.WORLD, layers) if divides else {}
    chunked = ChunkedLoss(torch.device("cpu"), chunk_logits=5 * VOCABULARY)
    with deferring(model.head, VOCABULARY, chunked) if defers else nullcontext() as head:
        logits = STEPS[step](model.head(model.embedding(tokens).tanh()))
        # As the Trainer's loss: a sum, divided by a number of the global batch.
        if beta is None:
            loss = functional.cross_entropy(
                logits.view(-1, VOCABULARY), targets, reduction="sum", label_smoothing=smoothing
            )
        else:
            teacher = teacher_rows(taught, beta=beta)
            if top is not None:
                teacher = TopRows(*likeliest(teacher, VOCABULARY, top), beta)
            loss = sum_divergences(logits, teacher, targets[None], ignore_index=-100)
        (3 * loss / 53).backward()
        assert not (defers and head.made_whole)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, shards


def compare(cases):
    for tied, step, smoothing, defers, *taught in cases:
        whole, expected, _ = run(tied, step, smoothing, *taught, divides=False, defers=False)
        loss, gradients, shards = run(tied, step, smoothing, *taught, divides=True, defers=defers)
        assert torch.allclose(loss, whole, rtol=1e-6)
        assert shards.keys() == gradients.keys() == expected.keys()
        for name, ours in gradients.items():
            [(start, stop)] = shards[name].parts
            assert stop - start < VOCABULARY
            assert (ours - expected[name][start:stop]).norm() < 1e-6 * expected[name].norm(), name


CASES = [(False, "none", 0.0, True), (True, "none", 0.1, True), (False, "cap", 0.1, True), (True, "cap", 0.0, True),
         (False, "bias of tokens", 0.0, True), (True, "none", 0.0, False), (False, "none", 0.0, False),
         (False, "none", 0.0, True, 0.0), (True, "cap", 0.0, True, 0.3), (False, "bias of tokens", 0.0, True, 1.0),
         (True, "none", 0.0, False, 0.5), (False, "bias of tokens", 0.0, True, 0.5, 7),
         (True, "cap", 0.0, True, 0.0, 1)]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_loss_and_all_gradients_are_those_of_one_process(num_ranks):
    run_ranks(compare, num_ranks, CASES)


def without_other_ranks_hidden():
    """The mistake: gradients of hidden states come from a rank's own tokens alone."""
    loss = ChunkedLoss.__call__

    def spoilt(chunked, rows):
        reduce = dist.all_reduce
        dist.all_reduce = lambda tensor, **more: None if tensor.shape[-1:] == (WIDTH,) else reduce(tensor, **more)
        try:
            return loss(chunked, rows)
        finally:
            dist.all_reduce = reduce

    ChunkedLoss.__call__ = spoilt


def each_rank_alone():
    """The mistake: what a rank has is taken for the whole vocabulary."""
    shared_vocabulary.dist = SimpleNamespace(all_reduce=lambda *args, **more: None, ReduceOp=dist.ReduceOp)


def with_padding():
    """The mistake: the row of padding is trained on the rank that has it."""
    look_up = linear._divided_lookup

    def spoilt(module, group):
        function, module.padding_idx = look_up(module, group), None
        return function

    linear._divided_lookup = spoilt


def compare_spoilt(spoil):
    spoil()
    compare(CASES[:1])


@pytest.mark.parametrize("spoil", [without_other_ranks_hidden, each_rank_alone, with_padding])
def test_a_mistake_shows(spoil):
    with pytest.raises(RankFailed, match="AssertionError"):
        run_ranks(compare_spoilt, 2, spoil)
