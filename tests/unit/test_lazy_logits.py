"""The loss of deferred logits is the model's own; models take part only where that was tried; DDP finds the tensors."""

import logging
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from hfdist.config.composition.compose import compose_config
from hfdist.models.loss import LossHead, UntriedError, choose_loss, why_model_needs_logits
from hfdist.models.loss.choose import FEW_LOGITS
from hfdist.models.loss.chunked import CHUNK_LOGITS, LEAST_ROWS, ChunkedLoss, _fusable, _losses_and_gradient
from hfdist.models.loss.deferred_rows import LogitsOperation, cast
from hfdist.models.loss.lazy_logits import _DeferredLogits, deferring, reduce_token_losses
from hfdist.models.partitioning import Partitioning
from hfdist.testing import run_ranks
from tests.unit.tiny import llama

ROWS, WIDTH, VOCABULARY, IGNORED = 24, 16, 40, -100
CPU = torch.device("cpu")
WHOLE = Partitioning()


def losses(head, use, *, dtype=None, chunk_logits=5 * VOCABULARY, loss=None):
    """What `use(logits, targets)` gives and all its gradients, from whole logits and from deferred ones."""
    torch.manual_seed(0)
    targets = torch.randint(VOCABULARY, (ROWS,))
    targets[3:9] = IGNORED
    found = []
    for is_deferred in (False, True):
        torch.manual_seed(1)
        hidden = torch.randn(2, ROWS // 2, WIDTH, requires_grad=True)
        head.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            if is_deferred:
                with deferring(head, VOCABULARY, loss or ChunkedLoss(CPU, chunk_logits=chunk_logits)) as seen:
                    value = use(head(hidden), targets)
            else:
                value = use(head(hidden), targets)
        (value * 3).backward()
        found.append([value.detach(), hidden.grad, *(p.grad for p in head.parameters() if p.requires_grad)])
    return *found, seen.made_whole


def agree(before, after, bound=1e-6):
    for one, other in zip(before, after, strict=True):
        assert one is not None
        assert (one - other).norm() <= bound * one.norm()


def plain(logits, targets, **kwargs):
    return functional.cross_entropy(logits.float().view(-1, VOCABULARY), targets, **kwargs)


def capped(logits, targets):
    logits = logits / 5.0
    return plain(torch.tanh(logits) * 5.0, targets, reduction="sum")


def scaled(logits, targets):
    logits *= 0.25
    return plain(logits + torch.linspace(0, 1, VOCABULARY)[None, None], targets)


def shifted(logits, targets):
    logits = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(logits.flatten(0, -2), targets.view(2, -1)[:, 1:].flatten(), reduction="sum")


def preferred(logits, targets):
    """No sum of the rows' losses: the gradient of each depends on all."""

    def reduce(losses):
        return -functional.logsigmoid((losses[: ROWS // 2].sum() - losses[ROWS // 2 :].sum()) / 10)

    return reduce_token_losses(logits / 2.0, targets, reduce, ignore_index=IGNORED)


USES = {
    "mean": plain,
    "preferred": preferred,
    "sum": lambda logits, targets: plain(logits, targets, reduction="sum"),
    "smoothed": lambda logits, targets: plain(logits, targets, label_smoothing=0.1),
    "capped": capped,
    "scaled": scaled,
    "shifted": shifted,
    "module": lambda logits, targets: nn.CrossEntropyLoss()(logits.reshape(-1, logits.size(-1)), targets),
    "no targets": lambda logits, targets: plain(logits, torch.full_like(targets, IGNORED), reduction="sum") + 0 * 1,
}


HEADS = {
    "weight": lambda: nn.Linear(WIDTH, VOCABULARY, bias=False),
    "weight and bias": lambda: nn.Linear(WIDTH, VOCABULARY),
    "any module": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("use", USES)
def test_same_losses_and_gradients_as_from_whole_logits(use, head):
    before, after, made_whole = losses(HEADS[head](), USES[use])
    agree(before, after)
    assert made_whole == []


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_what_is_frozen_gets_no_gradient(frozen):
    head = nn.Linear(WIDTH, VOCABULARY)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    before, after, _ = losses(head, plain)
    agree(before, after)
    assert len(after) == 2 + sum(p.requires_grad for p in head.parameters())


def topmost(logits, targets):
    return plain(logits, targets) + logits.topk(2, dim=-1).values.sum() / 100


def z_loss(logits, targets):
    return plain(logits, targets) + logits.logsumexp(-1).square().mean()


def masked(logits, targets):
    logits[..., 7] = -1e4
    return plain(logits, targets.masked_fill(targets == 7, 8))


def narrowed(logits, targets):
    return functional.cross_entropy(logits[..., :30].flatten(0, 1), targets.clamp(max=29))


def test_a_trained_scale_gets_its_gradient():
    scale = nn.Parameter(torch.tensor(2.0))
    grads = []
    head = nn.Linear(WIDTH, VOCABULARY)

    def use(logits, targets):
        scale.grad = None
        value = plain(logits * scale, targets)
        grads.append(torch.autograd.grad(value, scale, retain_graph=True)[0])
        return value

    before, after, _ = losses(head, use)
    agree(before, after)
    assert torch.allclose(*grads)


def test_the_head_is_itself_again_afterwards():
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden = torch.randn(1, 2, WIDTH)
    with deferring(head, VOCABULARY, ChunkedLoss(CPU)):
        assert isinstance(head(hidden), _DeferredLogits)
    assert isinstance(head(hidden), torch.Tensor)
    assert "forward" not in vars(head)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The most logits that a call gives."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        # The transposed weight is none.
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (VOCABULARY,) and value.shape[0] != WIDTH:
            self.most = max(self.most, value.numel())
        return value


def most_logits(loss, num_rows=ROWS):
    head = nn.Linear(WIDTH, VOCABULARY)
    with Watch() as watch, deferring(head, VOCABULARY, loss):
        plain(head(torch.randn(2, num_rows // 2, WIDTH)), torch.zeros(num_rows).long()).backward()
    return watch.most


def test_no_more_logits_exist_at_a_time_than_a_chunk_holds():
    with Watch() as watch:
        losses(nn.Linear(WIDTH, VOCABULARY), plain)
    assert watch.most == ROWS * VOCABULARY
    assert 0 < most_logits(ChunkedLoss(CPU, chunk_logits=5 * VOCABULARY)) <= 5 * VOCABULARY


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_makes_no_more_of_them_and_gives_the_same_loss(context):
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(2, ROWS // 2, WIDTH)
    targets = torch.randint(VOCABULARY, (ROWS,))
    with context():
        whole = plain(head(hidden), targets)
        with Watch() as watch, deferring(head, VOCABULARY, ChunkedLoss(CPU, chunk_logits=5 * VOCABULARY)) as seen:
            assert torch.isclose(plain(head(hidden), targets), whole, rtol=1e-6)
            # As a model without labels: transformers' mean over none.
            assert plain(head(hidden), torch.full_like(targets, IGNORED)).isnan()
    assert (0 < watch.most <= 5 * VOCABULARY, seen.made_whole) == (True, [])


def test_however_large_the_vocabulary_a_chunk_has_rows_enough(monkeypatch):
    """Each reads and writes the gradient of the whole head."""
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 1)
    assert most_logits(ChunkedLoss(CPU), 4 * LEAST_ROWS) == LEAST_ROWS * VOCABULARY


def test_the_form_that_is_compiled_for_gpus_computes_the_same():
    logits, targets = torch.randn(ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,))
    targets[:4] = IGNORED
    for one, other in zip(
        _fusable(logits.clone(), targets, IGNORED), _losses_and_gradient(logits.clone(), targets, IGNORED), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compute", [_fusable, _losses_and_gradient])
def test_an_ignored_row_need_not_be_finite(compute):
    logits, targets = torch.randn(ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,))
    targets[:4] = IGNORED
    logits[0], logits[1, 2] = torch.nan, torch.inf
    losses, gradient = compute(logits.clone(), targets, IGNORED)
    torch.testing.assert_close(losses, functional.cross_entropy(logits, targets, reduction="none"))
    assert (gradient[:4] == 0).all()
    assert gradient.isfinite().all()


def shares_of_exact(num_items):
    """How large the gradients of bfloat16 hidden states and head are, as shares of those by float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 64).bfloat16(), (torch.randn(200, 64) * 0.6).bfloat16()
    targets = (hidden.float() @ weight.float().T).softmax(-1).multinomial(1)[:, 0]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        head = nn.Linear(64, 200, bias=False, dtype=dtype)
        head.weight.data.copy_(weight)
        given = hidden.to(dtype).clone().requires_grad_()
        with deferring(head, 200, ChunkedLoss(CPU)):
            (functional.cross_entropy(head(given).float(), targets, reduction="sum") / num_items).backward()
        found.append([given.grad.float(), head.weight.grad.float()])
    return [float((rounded * exact).sum() / exact.square().sum()) for exact, rounded in zip(*found, strict=True)]


def test_no_number_of_tokens_makes_bfloat16_gradients_larger():
    # A power of two is exact in every type: what is left there comes from the logits' own rounding.
    unscaled = shares_of_exact(512)
    assert unscaled == pytest.approx([1, 1], abs=4e-4)
    for num_items in (257, 515, 769, 1025):
        assert shares_of_exact(num_items) == pytest.approx(unscaled, abs=2e-4)


def test_a_loss_goes_backward_once():
    head = nn.Linear(WIDTH, VOCABULARY)
    with deferring(head, VOCABULARY, ChunkedLoss(CPU)):
        loss = plain(head(torch.randn(2, ROWS // 2, WIDTH)), torch.zeros(ROWS).long())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"goes backward once.*model\.loss=full"):
        loss.backward()


def test_the_type_is_known_without_logits():
    head = nn.Linear(WIDTH, VOCABULARY)
    with torch.autocast("cpu", dtype=torch.bfloat16), deferring(head, VOCABULARY, ChunkedLoss(CPU)) as seen:
        logits = head(torch.randn(2, 3, WIDTH))
        assert (logits.dtype, logits.float().dtype, tuple(logits.shape)) == (torch.bfloat16, torch.float32, (2, 3, 40))
        assert (logits * 0.5).float()._per_row == (LogitsOperation(torch.mul, (0.5,)), cast(torch.float32))
    assert seen.made_whole == []


def computed_with(logits, targets):
    other = torch.ones(VOCABULARY, VOCABULARY)
    values = (logits - 1.0, 1.0 - logits, -logits, logits**2, 1 / (logits.abs() + 1), logits @ other, abs(logits) % 3)
    return plain(logits, targets) + sum(value.mean() for value in values) + next(iter(logits)).sum()


@pytest.mark.parametrize("use", [topmost, z_loss, masked, narrowed, computed_with])
def test_what_uses_the_logits_gets_them(use):
    before, after, made_whole = losses(nn.Linear(WIDTH, VOCABULARY), use)
    agree(before, after)
    assert made_whole


def test_logits_are_still_there_after_the_context():
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(2, ROWS // 2, WIDTH)
    with deferring(head, VOCABULARY, ChunkedLoss(CPU)):
        first, second, third = head(hidden), head(hidden), head(hidden)
    assert torch.equal(torch.softmax(first, -1), torch.softmax(head(hidden), -1))
    plain(second, torch.zeros(ROWS).long()).backward()
    with deferring(head, VOCABULARY, ChunkedLoss(CPU)):
        assert torch.equal(third + 0, head.forward(hidden).whole("a test"))
    assert head.weight.grad is not None
    assert len({first, second, third}) == 3


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
    return compose_config([f"model.loss={loss}", "train.max_steps=100", "data.sequence_length=8192"])


def test_what_could_not_be_tried_is_taken_only_where_it_is_asked_for(caplog):
    model = llama(OneWidth, hidden_size=96)
    with pytest.raises(UntriedError, match="only this width"):
        why_model_needs_logits(model)
    with caplog.at_level(logging.INFO, "hfdist"):
        assert choose_loss(config("auto"), model, Partitioning()) is None
        assert choose_loss(config("chunked"), model, Partitioning()) is not None
    said = [record for record in caplog.records if "only this width" in record.message]
    assert [record.levelno for record in said] == [logging.INFO, logging.WARNING]


def test_few_logits_are_made_whole():
    class Sharded(Partitioning):
        sharing_keys = "strategy.sharding"

    def has_head(*overrides, layout=WHOLE, **more):
        rows = FEW_LOGITS // llama().config.vocab_size // 2
        settings = [f"data.sequence_length={rows}", "train.micro_batch_size=2", "train.max_steps=100", *overrides]
        return choose_loss(compose_config(settings), llama(), layout, **more) is not None

    assert not has_head()
    assert has_head("model.loss=chunked")
    assert has_head("train.micro_batch_size=3")
    assert has_head("train.eval_micro_batch_size=3")
    assert has_head("train.precision=bf16")
    assert has_head(layout=Sharded())
    assert has_head(by_size=False)


@pytest.mark.parametrize(("kind", "why"), [(Insists, "no tensor"), (Subtracts, "__sub__"), (Own, None)])
def test_whatever_goes_wrong_with_deferred_logits_means_whole_ones(kind, why):
    reason = why_model_needs_logits(llama(kind))
    assert reason == (why and f"{kind.__name__} needs them whole ({why})")


def train_under_ddp():
    torch.manual_seed(0)
    model = llama().train()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    head, norms = LossHead(), []
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
