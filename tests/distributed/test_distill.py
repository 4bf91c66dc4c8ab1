"""Distillation: the loss is GKD's of transformers' own logits, and the same in every layout, without whole logits."""

import json
import shutil
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl.experimental.gkd import GKDTrainer

from hfdist.config.task import TaskConfig, TaskName
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.models.frozen import read_frozen
from hfdist.models.initialize import initialize_by_name
from hfdist.models.loss import chunked
from hfdist.models.partitioning import WHOLE
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from hfdist.tune import teacher
from hfdist.tune.student_answers import StudentAnswers
from hfdist.tune.teacher_check import check_teacher
from tests.distributed import trl_runs
from tests.distributed.preference_runs import GLOBAL_BATCH, LENGTH, STEPS, make_config, read_answers, tune
from tests.distributed.runs import eval_losses, losses
from tests.marks import many

pytestmark = pytest.mark.distributed

VOCABULARY = trl_runs.TINY["vocab_size"]
"""Of the student; the teacher has four rows more, as padded ones have."""
BETA, TEMPERATURE = 0.5, 2.0
CHUNK_ROWS = 10


def make_teacher(folder, **sizes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **trl_runs.TINY | sizes))
    initialize_by_name(model, 1)
    model.save_pretrained(folder)
    trl_runs.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student in `lm`, rows, and a teacher that knows what it says."""
    folder = tmp_path_factory.mktemp("start")
    trl_runs.write_models(folder)
    sizes = {"hidden_size": 56, "num_hidden_layers": 2, "initializer_range": 0.3, "vocab_size": VOCABULARY + 4}
    make_teacher(folder / "teacher", **sizes)
    rows = trl_runs.make_dataset("prompt", 60)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def own(folder, *overrides):
    values = {"teacher": folder / "teacher", "divergence_beta": BETA, "temperature": TEMPERATURE}
    return ["task=distill", "model.loss=chunked", *(f"task.{k}={v}" for k, v in values.items()), *overrides]


@contextmanager
def watching(share, is_kept):
    """Several chunks of a micro batch; more logits of the teacher at a time, or more of its weights, end the run.

    `share`: of the weights, that a rank has; 0: it may not read the teacher. `is_kept`: all ranks read it.
    """
    linear, read = functional.linear, teacher.read_frozen

    def limited(hidden, weight, bias=None):
        out = linear(hidden, weight, bias)
        assert len(weight) != VOCABULARY + 4 or out.numel() <= CHUNK_ROWS * len(weight), "a teacher's whole logits"
        return out

    def counted(*args, **kwargs):
        assert share, "the teacher is read"
        assert kwargs["layout"].computes_losses or is_kept, "a stage without losses reads the teacher"
        model = read(*args, **kwargs)
        # Before FSDP2 gathers for a forward: what the last one has left.
        model.register_forward_pre_hook(lambda *_: check_share(model), prepend=True)
        return model

    def check_share(model):
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
        # The last of many ranks have fewer rows than the first.
        assert held <= 1.03 * share * sum(p.numel() for p in model.parameters())

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.CHUNK_LOGITS, "cpu", CHUNK_ROWS * VOCABULARY * chunked.TENSORS_OF_DIVERGENCE)
        patch.setattr(chunked, "LEAST_ROWS", 1)
        patch.setattr(functional, "linear", limited)
        patch.setattr(teacher, "read_frozen", counted)
        yield


def distill(target, folder, num_ranks, *overrides, reads=True):
    # Of the ranks that compute losses: those of a last stage.
    sharded = {"zero3": 1, "fsdp2": 1, "tensor": 1, "pipeline_fsdp2": 2, "3d": 2}
    if "task.teacher_sharding=sharded" in overrides:
        sharded |= {"ddp": 1}
    if "task.teacher_sharding=whole" in overrides:
        sharded = {}
    num_stages = max((sharded.get(word.removeprefix("strategy="), 0) for word in overrides), default=0)
    is_kept = any(word.startswith("task.teacher_top_k=") for word in overrides)
    if is_kept:
        # All ranks run it together.
        num_stages = int(num_stages > 0 or "strategy=pipeline" in overrides)
    with watching((num_stages / num_ranks or 1) if reads else 0, is_kept):
        return tune(target, folder / "lm", folder / "rows.jsonl", num_ranks, *own(folder, *overrides))


LORA = ("adapter=lora", "adapter.merge=false", "adapter.targets=[q_proj,lm_head]")


SAVES = ("checkpoint.every=2", "checkpoint.keep=9")
TOP = ("task.teacher_top_k=5",)
OWN = ("task.on_policy=0.5", "task.max_new_tokens=9", "task.top_k=18", "task.top_p=0.98", "train.seed=1")
"""The second and the third step have answers of the student's own."""


@pytest.fixture(scope="module")
def single(tmp_path_factory, folder, cache_dir):
    """A run of each case on one process, made when it is asked for."""
    target = tmp_path_factory.mktemp("single")

    @cache
    def run(case):
        return distill(target / str(hash(case)), folder, 1, *case, *SAVES)

    return run


def test_the_loss_is_that_of_trl(single, folder, tmp_path):
    """Of each document by itself, from whole logits."""
    config = make_config(tmp_path, folder / "lm", folder / "rows.jsonl", *own(folder))
    [[first, *_]] = run_ranks(read_answers, 1, config, group=False)
    student, teaching = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("lm", "teacher"))
    total = torch.zeros(())
    for prompt, answer, _ in first:
        ids = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[IGNORED] * len(prompt) + answer])[:, 1:]
        with torch.no_grad():
            taught = teaching(ids).logits[:, :-1, :VOCABULARY]
        # TRL shifts by itself outside of this function.
        logits = student(ids).logits[:, :-1]
        total = total + GKDTrainer.generalized_jsd_loss(logits, taught, labels, BETA, TEMPERATURE, reduction="sum")
    loss = total / sum(len(answer) for _, answer, _ in first)
    loss.backward()
    assert losses(single(()))[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm()
    assert norms(single(()))[0] == pytest.approx(float(norm), rel=1e-5)
    assert len(first) > GLOBAL_BATCH
    assert len(set(losses(single(())))) == STEPS


def norms(run):
    return [line["grad_norm"] for line in read_lines(RunFolder(run).metrics) if "loss" in line]


def trained(run):
    """All weights, or those of the adapter."""
    [file] = [*run.glob("model/model.safetensors"), *run.glob("adapter/adapter_model.safetensors")]
    return load_file(file)


def check_equal(run, reference):
    for read in (losses, eval_losses, norms):
        assert read(run) == pytest.approx(read(reference), rel=1e-5)
    assert trl_runs.difference(trained(run), trained(reference)) < 1e-5


@pytest.mark.parametrize(
    ("case", "layout", "num_ranks"),
    [
        many((), "ddp", 2),
        many((), "ddp task.teacher_sharding=sharded", 2),
        many((), "zero1", 2),
        ((), "zero3 train.micro_batch_size=1", 2),
        many(LORA, "fsdp2", 2),
        many((), "fsdp2 strategy.reshard=false", 2),
        many((), "pipeline", 2),
        many((), "pipeline strategy.schedule=zbv train.micro_batch_size=1", 2),
        many((), "tensor", 2),
        many((), "tensor task.teacher_sharding=whole", 2),
        many((), "3d train.micro_batch_size=1", 8),
        many((), "zero2", 2),
        *(many(case, layout, 2) for case in (TOP, OWN) for layout in ("ddp", "zero3", "fsdp2", "tensor", "pipeline")),
        *(many(case, "3d train.micro_batch_size=1", 8) for case in (TOP, OWN)),
    ],
)
def test_a_layout_changes_nothing(single, folder, tmp_path, case, layout, num_ranks):
    run = distill(tmp_path, folder, num_ranks, *case, *f"strategy={layout}".split())
    check_equal(run, single(case))


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        many((), "fsdp2", "pipeline"),
        # The teacher is not read again.
        (TOP, None, "pipeline strategy.schedule=zbv train.micro_batch_size=1"),
        many(TOP, "tensor", "pipeline"),
        (OWN, None, "pipeline"),
        many(OWN, "pipeline", "ddp task.teacher_sharding=sharded"),
        many(OWN, "tensor", "zero3"),
    ],
)
def test_a_run_goes_on_in_another_layout(single, folder, tmp_path, case, before, after):
    """`before`: None: one process."""
    if before is None:
        run = Path(shutil.copytree(single(case), tmp_path / "run"))
    else:
        run = distill(tmp_path / "run", folder, 2, *case, *SAVES, *f"strategy={before}".split())
        check_equal(run, single(case))
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    distill(run, folder, 2, *case, *SAVES, *f"strategy={after}".split(), reads=case is not TOP)
    check_equal(run, single(case))


def test_all_tokens_that_are_kept_are_the_live_teacher(single, folder, tmp_path):
    """And of fewer the loss is a lower bound, which says the same of the data."""
    kept = distill(tmp_path, folder, 1, f"task.teacher_top_k={VOCABULARY}")
    check_equal(kept, single(()))
    assert 0.3 * losses(kept)[0] < losses(single(TOP))[0] < 0.99 * losses(kept)[0]
    files = list((tmp_path / "teacher").glob("rank-*.safetensors"))
    with safe_open(files[0], "np") as file:
        num_targets, count = file.get_slice("ids").get_shape()
    assert count == VOCABULARY
    # Ids and log-probabilities, and those of a document and the header.
    assert num_targets * (8 * count + 4) < files[0].stat().st_size < num_targets * (8 * count + 4) + 3000


def test_the_loss_of_own_answers_is_that_of_trl(folder, tmp_path, monkeypatch):
    """Of the tokens that the student has drawn in the first step, from whole logits."""
    answer = StudentAnswers.answer

    def kept(self, batches):
        found = answer(self, batches)
        torch.save(found, tmp_path / f"step-{self._training.state.global_step}.pt")
        return found

    monkeypatch.setattr(StudentAnswers, "answer", kept)
    run = distill(tmp_path / "run", folder, 1, "task.on_policy=1", "task.max_new_tokens=9", "report.log_every=1")
    student, teaching = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("lm", "teacher"))
    total, lengths = torch.zeros(()), []
    for batch in torch.load(tmp_path / "step-0.pt"):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            lengths.append(int((labels != IGNORED).sum()))
            stop = int(torch.nonzero(labels != IGNORED).max()) + 1
            ids, labels = ids[None, :stop], labels[None, 1:stop]
            taught = teaching(ids).logits[:, :-1, :VOCABULARY].detach()
            logits = student(ids).logits[:, :-1]
            total = total + GKDTrainer.generalized_jsd_loss(logits, taught, labels, BETA, TEMPERATURE, reduction="sum")
    (total / sum(lengths)).backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm()
    [first, *_] = [line for line in read_lines(RunFolder(run).metrics) if "loss" in line]
    assert first["loss"] == pytest.approx(float(total.detach()) / sum(lengths), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert first["completion_tokens"] == pytest.approx(sum(lengths) / len(lengths))
    assert len(lengths) == GLOBAL_BATCH
    assert max(lengths) <= 9
    shown = [line for line in read_lines(RunFolder(run).rollouts) if line["step"] == 1]
    words = AutoTokenizer.from_pretrained(folder / "lm")
    rows = [row for batch in torch.load(tmp_path / "step-0.pt") for row in batch["labels"]]
    texts = [words.decode(row[row != IGNORED], skip_special_tokens=True) for row in rows[: len(shown)]]
    assert [line["text"] for line in shown] == texts
    assert len(shown) == 2
    assert len({tuple(ids.tolist()) for batch in torch.load(tmp_path / "step-1.pt") for ids in batch["input_ids"]}) > 1


def test_a_teacher_is_named_before_it_is_read(folder, tmp_path, caplog):
    arguments, path = TrainingArguments(output_dir=tmp_path, use_cpu=True), str(folder / "teacher")
    with caplog.at_level("INFO", logger="hfdist"):
        read_frozen(AutoModelForCausalLM, path, where="task.teacher", layout=WHOLE, arguments=arguments)
    assert f"task.teacher: reading {path}" in caplog.text


def test_a_teacher_that_does_not_fit_is_refused(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "lm")
    student = AutoConfig.from_pretrained(folder / "lm")

    def check(path, **keys):
        task = TaskConfig(name=TaskName.distill, teacher=str(path), **keys)
        check_teacher(task, tokenizer, student, sequence_length=LENGTH)

    def refuse(path):
        with pytest.raises(ConfigError) as refused:
            check(path)
        assert refused.value.where == "task.teacher"
        return f"{refused.value} {refused.value.found}"

    check(folder / "teacher", teacher_top_k=VOCABULARY)
    with pytest.raises(ConfigError, match="has fewer tokens"):
        check(folder / "teacher", teacher_top_k=VOCABULARY + 1)
    assert "config.json" in refuse(tmp_path)
    assert f"{LENGTH - 1}" in refuse(make_teacher(tmp_path / "short", max_position_embeddings=LENGTH - 1))
    assert f"{VOCABULARY - 1} rows" in refuse(make_teacher(tmp_path / "small", vocab_size=VOCABULARY - 1))
    other = make_teacher(tmp_path / "other")
    AutoConfig.for_model("llama", **trl_runs.TINY | {"num_hidden_layers": 5}).save_pretrained(other)
    assert "missing" in refuse(other)
    larger = trl_runs.make_tokenizer()
    larger.add_tokens(["more"])
    larger.save_pretrained(make_teacher(tmp_path / "words", vocab_size=VOCABULARY + 1))
    assert "'more' is 20, not none" in refuse(tmp_path / "words")
