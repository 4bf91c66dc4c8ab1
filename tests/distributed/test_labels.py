"""Classifiers and cross-encoders: transformers' own Trainer and formulas beside them, and the same in every layout."""

import itertools
import json
import shutil

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from hfdist.data.label_tokens import to_tags
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from hfdist.tune.labelled_texts import IDS, LABELS, MASK, SEGMENTS, have_labels, take_apart
from tests.distributed.encoder_runs import write_encoder
from tests.distributed.preference_runs import EPSILON, GLOBAL_BATCH, RATE, STEPS, make_config, tune
from tests.distributed.runs import eval_losses, losses, weights
from tests.distributed.trl_runs import WORDS
from tests.marks import many

pytestmark = pytest.mark.distributed

FORMS = {
    "pairs": ("bert", "classify"),
    "several": ("distilbert", "classify"),
    "numbers": ("llama", "classify"),
    "words": ("modernbert", "token_classify"),
    "bce": ("roberta", "rerank"),
    "ranknet": ("bert", "rerank", "task.loss=ranknet"),
    "softmax": ("deberta-v2", "rerank", "task.loss=softmax"),
}
"""By what the rows have, or by the loss: a type of models, the task, and overrides."""


def make_row(form, number, say):
    if form == "pairs":
        return {"text": say(), "text_pair": say(), "label": ("no", "yes", "perhaps")[number % 3]}
    if form == "several":
        return {"text": say(), "label": [name for bit, name in enumerate("abc") if number >> bit & 1]}
    if form == "numbers":
        return {"text": say(), "label": number / 60}
    if form == "words":
        words = say().split()
        return {"tokens": words, "tags": [None if word == "a" else "BI"[len(word) % 2] for word in words]}
    return {"query": say(), "positive": say(), "negatives": [say() for _ in range(number % 3)]}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Give the model and the rows of a form."""
    known = {}

    def of(form):
        if form not in known:
            folder, generator = tmp_path_factory.mktemp(form), torch.Generator().manual_seed(0)

            def say():
                length = int(torch.randint(1, 7, (), generator=generator))
                return " ".join(WORDS[pick] for pick in torch.randint(len(WORDS), (length,), generator=generator))

            model = write_encoder(folder / "model", FORMS[form][0])
            rows = folder / "rows.jsonl"
            rows.write_text("".join(json.dumps(make_row(form, number, say)) + "\n" for number in range(60)))
            known[form] = model, rows
        return known[form]

    return of


def overrides_of(form):
    return (f"task={FORMS[form][1]}", *FORMS[form][2:])


@pytest.fixture(scope="module")
def single(tmp_path_factory, start, cache_dir):
    folder, known = tmp_path_factory.mktemp("single"), {}

    def of(form):
        if form not in known:
            known[form] = tune(folder / form, *start(form), 1, *overrides_of(form))
        return known[form]

    return of


def differ(ours, reference):
    """The largest difference of a tensor, relative where its norm is above 1.

    Rounding alone moves what has no gradient, such as the bias of keys, and that stays near 0.
    """
    assert ours.keys() == reference.keys()
    return max(float((ours[name] - value).norm() / value.norm().clamp_min(1)) for name, value in reference.items())


def figures(folder):
    names = ("accuracy", "f1", "recall_at_1", "mrr")
    lines = read_lines(RunFolder(folder).metrics)
    return [line[key] for line in lines for name in names for key in (name, f"eval_{name}") if key in line]


def check_equal(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    assert figures(run) == pytest.approx(figures(reference), rel=1e-6)
    assert differ(weights(run), weights(reference)) < 1e-5


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("pairs", "zero3 train.micro_batch_size=1"),
        ("bce", "pipeline"),
        many("pairs", "ddp"),
        many("pairs", "pipeline"),
        many("several", "zero2 train.micro_batch_size=1"),
        many("numbers", "fsdp2"),
        many("words", "fsdp2 train.micro_batch_size=1"),
        many("words", "pipeline"),
        many("ranknet", "ddp train.micro_batch_size=1"),
        many("softmax", "zero3"),
    ],
)
def test_a_layout_changes_nothing(single, start, tmp_path, form, layout):
    run = tune(tmp_path, *start(form), 2, *overrides_of(form), *f"strategy={layout}".split())
    check_equal(run, single(form))
    assert len(set(losses(run))) == len(losses(run)) == STEPS
    assert figures(run) or form == "numbers"


@pytest.mark.many  # the task has no state: as in test_resume.py
def test_a_run_goes_on_in_another_layout(single, start, tmp_path):
    saves = (*overrides_of("pairs"), "checkpoint.every=2", "checkpoint.keep=9")
    run = tune(tmp_path / "run", *start("pairs"), 1, *saves, "train.micro_batch_size=4")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, *start("pairs"), 2, *saves, "strategy=ddp")
    check_equal(run, single("pairs"))


def read_steps(config):
    """Give the batches of the steps of a run, texts apart, and the names of its labels."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    batches = iter(run.data.stream.at_beginning().loader(batch_size=GLOBAL_BATCH))
    steps = [take_apart(batch, 0) for batch in itertools.islice(batches, STEPS)]
    # Lists: shared memory of tensors would end with this process.
    return [{name: value.tolist() for name, value in one.items()} for one in steps], run.config.data.labels.names


def read_items(folder, form, start):
    """Give the batches of the steps of a run, and the names of its labels."""
    [(steps, names)] = run_ranks(read_steps, 1, make_config(folder, *start, *overrides_of(form)), group=False)
    return [{name: torch.tensor(value) for name, value in one.items()} for one in steps], names


def train_with_transformers(folder, model, items, collator):
    """Give the losses and the weights of transformers' own Trainer, which reads the items in their order."""

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(items)

    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=GLOBAL_BATCH, learning_rate=RATE,
        adam_epsilon=EPSILON, lr_scheduler_type="constant", weight_decay=0.0, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(model, arguments, train_dataset=items, data_collator=collator)
    trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return found, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def make_item(batch, row, labels, *, has_segments):
    """A row as transformers' collators take it."""
    length = int(batch[MASK][row, 0].sum())
    item = {"input_ids": batch[IDS][row, 0, :length].tolist(), "attention_mask": [1] * length, "labels": labels}
    return item | ({"token_type_ids": batch[SEGMENTS][row, 0, :length].tolist()} if has_segments else {})


@pytest.mark.parametrize("form", ["pairs", many("words")])
def test_losses_and_weights_are_those_of_transformers(single, start, tmp_path, form):
    folder, rows = start(form)
    steps, names = read_items(tmp_path / "read", form, (folder, rows))
    is_of_words = form == "words"
    items = []
    for batch in steps:
        for row in range(GLOBAL_BATCH):
            tags = to_tags(batch[LABELS][row, 0])[: int(batch[MASK][row, 0].sum())].tolist()
            label = tags if is_of_words else int(batch[LABELS][row, 0, 0])
            items.append(make_item(batch, row, label, has_segments=not is_of_words))
    kind = AutoModelForTokenClassification if is_of_words else AutoModelForSequenceClassification
    named = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    model = kind.from_pretrained(folder, dtype=torch.float32, **named)
    run = single(form)
    trained = kind.from_pretrained(run / "model")
    assert trained.config.id2label == named["id2label"]
    # The head is new, and hfdist's seed draws it.
    first = tune(tmp_path / "first", folder, rows, 1, *overrides_of(form), "optimizer.lr=1e-30", "train.max_steps=1",
                 "train.eval_every=null")  # fmt: skip
    model.load_state_dict(weights(first), strict=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    collator = (DataCollatorForTokenClassification if is_of_words else DataCollatorWithPadding)(tokenizer)
    wanted, state = train_with_transformers(tmp_path / "trainer", model, items, collator)
    # It logs four digits.
    assert losses(run) == pytest.approx(wanted, abs=1e-4)
    ours = weights(run)
    assert differ(ours, {name: state[name] for name in ours}) < 1e-5


@pytest.mark.parametrize("form", ["bce", many("ranknet"), many("softmax")])
def test_losses_of_rankings_are_those_of_their_formulas(single, start, tmp_path, form):
    folder, rows = start(form)
    steps, _ = read_items(tmp_path / "read", form, (folder, rows))
    first = tune(tmp_path / "first", folder, rows, 1, *overrides_of(form), "optimizer.lr=1e-30", "train.max_steps=1",
                 "train.eval_every=null")  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(first / "model").eval()
    assert model.config.num_labels == 1
    batch, found = steps[0], []
    for row, is_there in enumerate(have_labels(batch)):
        scores = []
        for number in is_there.nonzero()[:, 0].tolist():
            length = int(batch[MASK][row, number].sum())
            more = {"token_type_ids": batch[SEGMENTS][row, number, :length][None]} if form == "ranknet" else {}
            with torch.no_grad():
                scores.append(model(input_ids=batch[IDS][row, number, :length][None], **more).logits[0, 0])
        scores = torch.stack(scores)
        if form == "bce":
            wanted = torch.zeros(len(scores))
            wanted[0] = 1
            found += binary_cross_entropy_with_logits(scores, wanted, reduction="none").tolist()
        elif len(scores) > 1:
            pairs = -logsigmoid(scores[0] - scores[1:]).mean()
            found.append(float(pairs if form == "ranknet" else cross_entropy(scores[None], torch.tensor([0]))))
    assert losses(single(form))[0] == pytest.approx(sum(found) / len(found), rel=1e-5)
