"""The divergence from a teacher is GKD's, whole and by chunks, and no more logits exist than a chunk holds."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

from hfdist.config.task import TaskConfig, TaskName
from hfdist.models.loss import LossHead
from hfdist.models.loss.chunked import TENSORS_OF_DIVERGENCE, ChunkedLoss
from hfdist.models.loss.lazy_logits import deferring, sum_divergences, teacher_rows
from hfdist.models.loss.teacher_rows import TopRows, WholeRows, divergences
from hfdist.models.partitioning import Partitioning
from hfdist.tune.distill import Distillation
from hfdist.tune.kept_teacher import likeliest
from hfdist.tune.teacher import Teacher

ROWS, WIDTH, VOCABULARY, IGNORED = 24, 16, 40, -100
TEACHER_WIDTH, TEACHER_VOCABULARY = 20, 44
CPU = torch.device("cpu")
BETAS = (0.0, 0.3, 0.5, 1.0)


def make_targets():
    targets = torch.randint(VOCABULARY, (2, ROWS // 2))
    targets[:, 3:7] = IGNORED
    return targets


def whole(logits, beta):
    return WholeRows(logits, lambda rows: rows, beta)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_trl(beta, temperature):
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(2, ROWS // 2, VOCABULARY, dtype=torch.float64) for _ in range(2))
    targets, found = make_targets(), []
    for ours in (True, False):
        own = student.clone().requires_grad_()
        if ours:
            rows = [(one / temperature).flatten(0, 1) for one in (own, teacher)]
            # Rows without a target need not be finite.
            rows[1][targets.flatten() == IGNORED] = torch.nan
            value = divergences(rows[0], whole(rows[1], beta), targets.flatten() != IGNORED).sum()
        else:
            value = GKDTrainer.generalized_jsd_loss(own, teacher, targets, beta, temperature, reduction="sum")
        value.backward()
        found.append((value.detach(), own.grad))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-12


def capped(logits):
    return torch.tanh(logits * 0.5 / 5.0) * 5.0


def biased(logits):
    return logits / 0.7 + torch.linspace(0, 1, logits.shape[-1])[None, None]


def cut(logits):
    return logits[:, :-1]


HEADS = {
    "weight": lambda: nn.Linear(WIDTH, VOCABULARY, bias=False),
    "weight and bias": lambda: nn.Linear(WIDTH, VOCABULARY),
    "any module": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)),
}


def distill(head, teacher_head, of_student, of_teacher, *, beta, defers, loss, top=None):
    """The sum of divergences, and all gradients of thrice of it; `defers`: the student, the teacher.

    `top`: likeliest tokens that are known of the teacher; None: all.
    """
    torch.manual_seed(1)
    hidden = torch.randn(2, ROWS // 2, WIDTH, requires_grad=True)
    taught = torch.randn(2, ROWS // 2, TEACHER_WIDTH)
    targets = make_targets()
    head.zero_grad()
    with ExitStack() as deferred:
        seen = [
            deferred.enter_context(deferring(own, own_vocabulary, loss))
            for own, own_vocabulary, is_deferred in zip(
                (head, teacher_head), (VOCABULARY, TEACHER_VOCABULARY), defers, strict=True
            )
            if is_deferred
        ]
        with torch.no_grad():
            teacher = of_teacher(teacher_head(taught))
        student = of_student(head(hidden))
        rows = teacher_rows(teacher, beta=beta)
        if top is not None:
            rows = TopRows(*likeliest(rows, VOCABULARY, top), beta)
        value = sum_divergences(student, rows, targets[:, : student.shape[1]], ignore_index=IGNORED)
    # A student that is whole needs the teacher whole, too.
    assert not (defers[0] and any(one.made_whole for one in seen))
    (value * 3).backward()
    return [value.detach(), hidden.grad, *(p.grad for p in head.parameters() if p.requires_grad)]


@pytest.mark.parametrize(
    ("head", "of_student", "of_teacher", "beta"),
    [
        ("weight", biased, capped, 0.0),
        ("weight and bias", capped, biased, 0.5),
        ("any module", cut, cut, 0.3),
        ("weight", capped, capped, 1.0),
    ],
)
def test_chunks_of_both_heads_give_the_same(head, of_student, of_teacher, beta):
    torch.manual_seed(0)
    student, teacher = HEADS[head](), nn.Linear(TEACHER_WIDTH, TEACHER_VOCABULARY).requires_grad_(False)
    chunked = ChunkedLoss(CPU, chunk_logits=5 * TENSORS_OF_DIVERGENCE * VOCABULARY)
    cases = [(False, False), (True, True), (True, False), (False, True)]
    whole, *others = (
        distill(student, teacher, of_student, of_teacher, beta=beta, defers=defers, loss=chunked) for defers in cases
    )
    assert whole[0] > 0.1
    for found in others:
        for one, other in zip(found, whole, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()


def test_chunks_with_the_likeliest_tokens_give_the_same():
    torch.manual_seed(0)
    teacher = nn.Linear(TEACHER_WIDTH, TEACHER_VOCABULARY).requires_grad_(False)
    chunked = ChunkedLoss(CPU, chunk_logits=5 * TENSORS_OF_DIVERGENCE * VOCABULARY)
    student = HEADS["weight and bias"]()
    cases = [(defers, top) for defers in ((False, False), (True, True)) for top in (6, VOCABULARY)]
    found = [
        distill(student, teacher, capped, biased, beta=0.3, defers=defers, loss=chunked, top=top)
        for defers, top in cases
    ]
    # All tokens are the whole distribution.
    exact = distill(student, teacher, capped, biased, beta=0.3, defers=(False, False), loss=chunked)
    for ours, reference in ((found[2], found[0]), (found[1], exact), (found[3], exact)):
        for one, other in zip(ours, reference, strict=True):
            assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("beta", BETAS)
def test_of_the_likeliest_tokens_it_is_that_of_trl_with_a_tail(beta):
    """Its value and gradient; and the fewer tokens are known, the less it can be."""
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(ROWS, VOCABULARY, dtype=torch.float64) for _ in range(2))
    is_target = torch.arange(ROWS) % 5 > 0
    values = []
    for count in (1, 4, 16, VOCABULARY - 1):
        ids, logs = likeliest(whole(teacher, beta), VOCABULARY, count)
        found = []
        for ours in (True, False):
            own = student.clone().requires_grad_()
            if ours:
                value = divergences(own, TopRows(ids, logs, beta), is_target).sum()
            else:
                logits = [own.log_softmax(-1).gather(1, ids.long()), logs[:, :-1]]
                parts = [_add_tail_bucket(one, torch.ones_like(one, dtype=torch.bool)) for one in logits]
                value = _jsd_divergence(*(one for one, _ in parts), beta, parts[0][1])[is_target].sum()
            value.backward()
            found.append((value.detach(), own.grad))
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 1e-9 * other.norm()
        values.append(float(found[0][0]))
    assert values == sorted(values)
    # 39 tokens and a tail are all 40.
    assert values[-1] == pytest.approx(float(divergences(student, whole(teacher, beta), is_target).sum()))
    assert 0 < values[0] < 0.9 * values[-1]


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The most logits that a call gives, of either vocabulary."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        is_of_logits = isinstance(value, torch.Tensor) and value.shape[-1:] in ((VOCABULARY,), (TEACHER_VOCABULARY,))
        # The transposed weights are none.
        if is_of_logits and value.shape[0] not in (WIDTH, TEACHER_WIDTH):
            self.most = max(self.most, value.numel())
        return value


@pytest.mark.parametrize("evaluates", [False, True])
def test_no_more_logits_exist_at_a_time_than_a_chunk_holds(evaluates):
    head, teacher = nn.Linear(WIDTH, VOCABULARY), nn.Linear(TEACHER_WIDTH, TEACHER_VOCABULARY).requires_grad_(False)
    chunked = ChunkedLoss(CPU, chunk_logits=3 * TENSORS_OF_DIVERGENCE * VOCABULARY)
    most = []
    for defers in ((True, True), (False, False)):
        with Watch() as watch:
            if evaluates:
                head.requires_grad_(False)
            distill(head, teacher, capped, capped, beta=0.5, defers=defers, loss=chunked)
        most.append(watch.most)
    assert most[1] == ROWS * TEACHER_VOCABULARY
    assert 0 < most[0] <= 3 * TEACHER_VOCABULARY


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
         "num_key_value_heads": 1, "vocab_size": VOCABULARY, "initializer_range": 0.5, "pad_token_id": 0}  # fmt: skip
SCALED = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize(("student", "teacher"), [("cohere", "gemma2"), ("granite", "cohere"), ("gemma2", "granite")])
def test_scales_and_caps_of_models_count(student, teacher):
    """Of the model that is trained, and of its teacher: as transformers applies them to whole logits."""
    torch.manual_seed(0)
    models = []
    for kind in (student, teacher):
        config = AutoConfig.for_model(kind, **SIZES, **SCALED[kind])
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    trained, frozen = models[0], models[1].requires_grad_(False).eval()
    batch = {"input_ids": torch.randint(VOCABULARY, (2, ROWS // 2)), "labels": make_targets()}
    task = TaskConfig(name=TaskName.distill, divergence_beta=0.5, temperature=2.0)
    taught = Teacher(task, layout=Partitioning(), arguments=TrainingArguments(use_cpu=True))
    taught._model = frozen
    objective, found = Distillation(task, taught), []
    for head in (LossHead(chunk_logits=5 * TENSORS_OF_DIVERGENCE * VOCABULARY), None):
        trained.zero_grad()
        objective._training = SimpleNamespace(head=head, image_names=())
        with Watch() as watch:
            value = objective.loss(trained, batch)
        value.backward()
        found.append([value.detach(), *(p.grad.clone() for p in trained.parameters())])
        assert (watch.most <= 5 * VOCABULARY) == (head is not None)
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    logits = [model(batch["input_ids"]).logits[:, :-1] for model in models]
    plain = GKDTrainer.generalized_jsd_loss(*logits, batch["labels"][:, 1:], 0.5, 2.0, reduction="sum")
    assert found[0][0] == pytest.approx(float(plain.detach()), rel=1e-5)
