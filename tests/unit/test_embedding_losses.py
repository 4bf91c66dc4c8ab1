"""Losses of embeddings beside formulas written out, and places of positives among all documents."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.models.loss.embedding_losses import (
    LOSSES,
    NEGATIVE,
    POSITIVE,
    QUERY,
    Texts,
    first_dimensions,
    losses_of,
    rank_correlation,
    ranks_of_positives,
)

KINDS = [QUERY, POSITIVE, NEGATIVE, QUERY, POSITIVE, QUERY, POSITIVE, NEGATIVE, NEGATIVE]
"""Three queries with one, no and two negatives."""
Q, D, N = (0, 3, 5), (1, 4, 6), (2, 7, 8)
OWN = {0: (2,), 1: (), 2: (7, 8)}


def make(width=8):
    embeddings = torch.randn(len(KINDS), width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Texts(embeddings.requires_grad_(), torch.tensor(KINDS))


def task(loss, **fields):
    return TaskConfig(name=TaskName.embed, loss=TaskLoss[loss], **fields)


def cross_entropy(scores, number):
    return torch.logsumexp(torch.stack(scores), 0) - scores[number]


def plainly(e, loss, scale=20.0, margin=0.0, normalized=True):
    """The mean over queries, text by text."""
    e = torch.stack([row / row.norm() for row in e]) if normalized else e
    found = []
    for number, query in enumerate(Q):
        forward = cross_entropy([scale * e[query] @ e[d] for d in (*D, *N)], number)
        if loss == "infonce":
            found.append(forward)
        elif loss == "infonce_both":
            back = cross_entropy([scale * e[q] @ e[D[number]] for q in Q], number)
            found.append((forward + back) / 2)
        elif OWN[number]:
            near = (e[query] - e[D[number]]).norm()
            found.append(
                sum((near - (e[query] - e[n]).norm() + margin).clamp(min=0) for n in OWN[number]) / len(OWN[number])
            )
    return sum(found)


def test_every_loss_of_a_task_has_its_formula():
    assert set(LOSSES) == set(TaskName.embed.traits.losses)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("loss", "fields"), [("infonce", {}), ("infonce_both", {"scale": 3.0}), ("triplet", {"margin": 2.5})]
)
def test_values_and_gradients_are_those_of_the_formula(loss, fields, normalize):
    texts = make()
    ours = losses_of(texts, task(loss, normalize=normalize, **fields)).sum()
    wanted = plainly(texts.embeddings, loss, normalized=normalize, **fields)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-12)
    (own,), (other,) = (torch.autograd.grad(value, texts.embeddings) for value in (ours, wanted))
    assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


def test_matryoshka_adds_the_losses_of_the_first_dimensions():
    texts = make()
    parts = [plainly(texts.embeddings[:, :size], "infonce") for size in (2, 8)]
    assert losses_of(texts, task("infonce", matryoshka=[2, 8])).sum().item() == pytest.approx(sum(parts).item())


def test_cosent_wants_pairs_in_the_order_of_their_scores():
    texts = dataclasses.replace(make(), scores=torch.tensor([0.2, 0.9, 0.2]))
    losses = losses_of(texts, task("cosent", scale=3.0))
    e = torch.nn.functional.normalize(texts.embeddings, dim=-1)
    similar = [3 * e[q] @ e[d] for q, d in zip(Q, D, strict=True)]
    wanted = torch.log(1 + sum(torch.exp(similar[low] - similar[1]) for low in (0, 2)))
    assert torch.allclose(losses, wanted.expand(3), rtol=1e-12)
    (own,), (other,) = (torch.autograd.grad(value, texts.embeddings) for value in (losses.mean(), wanted))
    assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


def test_cosent_makes_no_table_of_all_two_pairs():
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, made.numel())
            return made

    number = 500
    embeddings = torch.randn(2 * number, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    kinds, scores = torch.tensor([QUERY, POSITIVE] * number), torch.arange(number) % 7
    with Sizes() as sizes:
        losses_of(Texts(embeddings, kinds, scores=scores.float()), task("cosent")).sum().backward()
    assert sizes.largest <= 10 * number


def test_rank_correlation_is_that_of_mean_ranks():
    # Similarities 0, 1 and 2; scores of which two are alike.
    texts = Texts(torch.tensor([[1.0], [0.0], [1.0], [1.0], [1.0], [2.0]]), torch.tensor([QUERY, POSITIVE] * 3))
    for scores, wanted in (([1, 2, 3], 1.0), ([3, 2, 1], -1.0), ([1, 1, 3], 0.75**0.5), ([1, 1, 1], 0.0)):
        found = rank_correlation(dataclasses.replace(texts, scores=torch.tensor(scores)))
        assert found == pytest.approx(wanted)


def test_a_step_without_queries_has_no_loss():
    texts = Texts(torch.zeros(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.long))
    texts = dataclasses.replace(texts, scores=torch.zeros(0))
    for loss in LOSSES:
        assert losses_of(texts, task(loss.value)).shape == (0,)
    assert ranks_of_positives(texts).shape == (0,)


def test_places_count_what_is_nearer_and_what_is_as_near():
    corners = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    texts = Texts(corners, torch.tensor([QUERY, POSITIVE, QUERY, POSITIVE, NEGATIVE]))
    assert ranks_of_positives(texts).tolist() == [2, 1]
    same = Texts(torch.ones(5, 2), texts.kinds)
    assert ranks_of_positives(first_dimensions(same, 2, task("infonce"))).tolist() == [3, 3]


@pytest.mark.parametrize("loss", ["infonce", "infonce_both"])
def test_equal_texts_are_no_negatives(loss):
    texts = make()
    # The second query is the first one, the third positive and the first negative are the same text.
    numbers = torch.tensor([0, 1, 2, 0, 3, 5, 2, 6, 7])
    masked = {Q[0]: {D[1]}, Q[1]: {D[0]}, Q[2]: {N[0]}}
    e = torch.nn.functional.normalize(texts.embeddings, dim=-1)
    wanted = []
    for number, query in enumerate(Q):
        scores = {d: 20 * e[query] @ e[d] for d in (*D, *N) if d not in masked[query]}
        one = torch.logsumexp(torch.stack(list(scores.values())), 0) - scores[D[number]]
        if loss == "infonce_both":
            kept = [q for q, d in zip(Q, D, strict=True) if d not in masked[query]]
            back = torch.logsumexp(torch.stack([20 * e[q] @ e[D[number]] for q in kept]), 0) - scores[D[number]]
            one = (one + back) / 2
        wanted.append(one)
    ours = losses_of(dataclasses.replace(texts, numbers=numbers), task(loss))
    assert torch.allclose(ours, torch.stack(wanted), rtol=1e-12)
    (own,), (other,) = (torch.autograd.grad(v.sum(), texts.embeddings) for v in (ours, torch.stack(wanted)))
    assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)
    same = Texts(torch.ones(9, 2), texts.kinds, numbers)
    assert ranks_of_positives(same).tolist() == [5, 5, 5]


@pytest.mark.parametrize("most", [1, 12, 18])
def test_scores_in_parts_are_those_of_all(monkeypatch, most):
    texts = make()
    whole = [losses_of(texts, task(loss)) for loss in ("infonce", "infonce_both")]
    wanted = [torch.autograd.grad(losses.sum(), texts.embeddings)[0] for losses in whole]
    found = ranks_of_positives(texts)
    monkeypatch.setattr("hfdist.models.loss.embedding_losses._MOST_SCORES", most)
    assert ranks_of_positives(texts).tolist() == found.tolist()
    for loss, all_losses, gradient in zip(("infonce", "infonce_both"), whole, wanted, strict=True):
        parts = losses_of(texts, task(loss))
        assert torch.allclose(parts, all_losses, rtol=1e-12)
        assert torch.allclose(torch.autograd.grad(parts.sum(), texts.embeddings)[0], gradient, rtol=1e-10)


@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="sentence-transformers is asked")
@pytest.mark.parametrize(("loss", "kind"), [("infonce", "MultipleNegativesRankingLoss"), ("infonce_both", "Multiple"
                                            "NegativesSymmetricRankingLoss")])  # fmt: skip
def test_sentence_transformers_has_the_same(loss, kind):
    from sentence_transformers.sentence_transformer import losses

    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(4, 8, generator=generator) for _ in range(3)]
    theirs = getattr(losses, kind)(torch.nn.Identity()).compute_loss_from_embeddings(columns, torch.zeros(4))
    embeddings = torch.stack(list(itertools.chain.from_iterable(zip(*columns, strict=True))))
    ours = losses_of(Texts(embeddings, torch.tensor([QUERY, POSITIVE, NEGATIVE] * 4)), task(loss))
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-6)
