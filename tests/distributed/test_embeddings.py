"""Embedding models: plain torch over all texts of a step, text by text; and the same in every layout."""

import itertools
import json
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

from hfdist.data.packing.sequence import IGNORED
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run
from hfdist.testing import run_ranks
from tests.distributed import trl_runs
from tests.distributed.encoder_runs import write_encoder
from tests.distributed.preference_runs import EPSILON, GLOBAL_BATCH, RATE, STEPS, make_config, tune
from tests.distributed.runs import eval_losses, losses, weights
from tests.marks import chosen, many

pytestmark = pytest.mark.distributed

FORMS = {
    "last": ("task=embed",),
    "mean": ("task=embed", "task.loss=infonce_both", "task.pooling=mean", "task.matryoshka=[8,32]"),
    # In the last steps some lanes have no row left.
    "short": (
        "task=embed",
        "task.mask_duplicates=true",
        "adapter=lora",
        "train.max_steps=null",
        "train.epochs=1",
        "data.eval_fraction=0",
        "train.eval_every=null",
    ),
    "triplet": ("task=embed", "task.loss=triplet", "task.margin=0.5"),
}
ENCODERS = {
    "infonce": ("bert", "task=embed"),
    "cosent": ("bert", "task=embed", "task.loss=cosent"),
}
"""By the loss: a type of encoders, and overrides."""


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    has_four_stages = any("zbv" in one for one in chosen(request, "layout"))
    trl_runs.write_models(folder, num_hidden_layers=4 if has_four_stages else 2)
    return folder / "lm"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts of many lengths, with none, one or two negatives."""
    path, generator = tmp_path_factory.mktemp("rows") / "rows.jsonl", torch.Generator().manual_seed(0)

    def say():
        length = int(torch.randint(1, 7, (), generator=generator))
        picks = torch.randint(len(trl_runs.WORDS), (length,), generator=generator)
        return " ".join(trl_runs.WORDS[pick] for pick in picks)

    with path.open("w") as file:
        for number in range(60):
            row = {"query": say(), "positive": say(), "negatives": [say() for _ in range(number % 3)]}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def single(tmp_path_factory, model, rows, cache_dir):
    folder, known = tmp_path_factory.mktemp("single"), {}

    def of(form):
        if form not in known:
            known[form] = tune(folder / form, model, rows, 1, *FORMS[form])
        return known[form]

    return of


def figures(folder, prefix=""):
    lines = [line for line in read_lines(RunFolder(folder).metrics) if f"{prefix}mrr" in line]
    return [line[f"{prefix}{name}"] for line in lines for name in ("recall_at_1", "mrr")]


def check_equal(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    for prefix in ("", "eval_"):
        assert figures(run, prefix) == pytest.approx(figures(reference, prefix), rel=1e-6)
    assert trl_runs.difference(weights(run), weights(reference)) < 1e-5


@pytest.mark.parametrize(
    ("form", "layout", "num_ranks"),
    [
        many("last", "single train.micro_batch_size=1", 1),
        many("last", "zero3", 2),
        many("last", "tensor train.micro_batch_size=4", 2),
        ("last", "pipeline", 2),
        many("mean", "fsdp2 train.micro_batch_size=1", 2),
        ("short", "zero3 train.micro_batch_size=1", 2),
        many("mean", "pipeline strategy.schedule=zbv", 2),
        many("mean", "tensor", 2),
        many("last", "ddp", 2),
        many("last", "fsdp2 strategy.tensor=2", 4),
        many("last", "3d train.micro_batch_size=1", 8),
        many("short", "pipeline", 2),
        many("short", "ddp train.micro_batch_size=1", 4),
        many("triplet", "ddp", 2),
        many("short", "zero2", 2),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, model, rows, form, layout, num_ranks):
    run = tune(tmp_path, model, rows, num_ranks, *FORMS[form], *f"strategy={layout}".split())
    check_equal(run, single(form))
    assert len(set(losses(run))) == len(losses(run)) > 3


@pytest.mark.parametrize(("form", "layout"), [("cosent", "zero3 train.micro_batch_size=1"), many("infonce", "fsdp2"),
                                              many("infonce", "ddp")])  # fmt: skip
def test_encoders_are_the_same_in_a_layout(tmp_path, rows, form, layout):
    kind, *overrides = ENCODERS[form]
    model = write_encoder(tmp_path / "model", kind)
    if form == "cosent":
        pairs = [json.loads(line) for line in rows.read_text().splitlines()]
        rows = tmp_path / "pairs.jsonl"
        scored = ({"text_a": row["query"], "text_b": row["positive"], "score": n % 7} for n, row in enumerate(pairs))
        rows.write_text("".join(json.dumps(row) + "\n" for row in scored))
    one = tune(tmp_path / "one", model, rows, 1, *overrides)
    two = tune(tmp_path / "two", model, rows, 2, *overrides, *f"strategy={layout}".split())
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert eval_losses(two) == pytest.approx(eval_losses(one), rel=1e-5)
    ours, reference = weights(two), weights(one)
    # What has no gradient, such as the bias of keys, is moved by rounding alone.
    assert all(float((ours[name] - own).norm() / own.norm().clamp_min(1)) < 1e-5 for name, own in reference.items())
    pooling = json.loads((one / "model" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"]


@pytest.mark.many  # the task has no state: as in test_resume.py
def test_a_run_goes_on_in_another_layout(single, tmp_path, model, rows):
    saves = (*FORMS["last"], "checkpoint.every=2", "checkpoint.keep=9")
    run = tune(tmp_path / "run", model, rows, 1, *saves, "train.micro_batch_size=1")
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(run / "model")
    tune(run, model, rows, 2, *saves, "strategy=ddp")
    check_equal(run, single("last"))


def read_texts(config):
    """For each step of a run: [(ids, whether it is a query)] in order, and the row of each."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    batches, steps = iter(run.data.stream.at_beginning().loader(batch_size=GLOBAL_BATCH)), []
    for batch in itertools.islice(batches, STEPS):
        found = []
        for number, (ids, places, labels) in enumerate(
            zip(*(batch[k] for k in ("input_ids", "position_ids", "labels")), strict=True)
        ):
            starts = [*torch.nonzero(places == 0)[:, 0].tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                targets = labels[start:stop][labels[start:stop] != IGNORED]
                if len(targets):
                    found.append((ids[start:stop].tolist(), bool(targets[0] >= 0), number))
        steps.append(found)
    return steps


def infonce(embeddings, kinds):
    """The mean over queries, and the rows of `kinds` that are left out count for nothing."""
    queries = [place for place, is_query in enumerate(kinds) if is_query]
    others = [place + 1 for place in queries]
    others += [place for place in range(len(kinds)) if place not in queries and place not in others]
    scores = 20 * normalize(embeddings[queries]) @ normalize(embeddings[others]).T
    return cross_entropy(scores, torch.arange(len(queries)))


def train_plainly(start, steps):
    """Give the loss of each step, that with the texts of each row by themselves, and the weights."""
    model = AutoModel.from_pretrained(start, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.0)
    found, by_row = [], []
    for texts in steps:
        embeddings = torch.stack([model(input_ids=torch.tensor([ids]))[0][0, -1] for ids, _, _ in texts])
        kinds, of_row = [is_query for _, is_query, _ in texts], torch.tensor([row for _, _, row in texts])
        loss = infonce(embeddings, kinds)
        parts = [(of_row == row).nonzero()[:, 0] for row in of_row.unique()]
        each = [infonce(embeddings[part], [kinds[place] for place in part.tolist()]) for part in parts]
        by_row.append(torch.stack(each).mean().item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found, by_row, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_losses_and_weights_are_those_of_plain_torch_over_the_whole_step(single, tmp_path, model, rows):
    config = make_config(tmp_path / "read", model, rows, *FORMS["last"])
    [steps] = run_ranks(read_texts, 1, config, group=False)
    wanted, of_rows, state = train_plainly(model, steps)
    run = single("last")
    assert losses(run) == pytest.approx(wanted, rel=1e-5)
    assert trl_runs.difference(weights(run), state) < 1e-5
    # What negatives of a micro batch alone would give, which is far from it.
    assert abs(of_rows[0] - wanted[0]) > 0.1
    check_folder(run / "model", state)


def check_folder(folder, state):
    """The folder's tokenizer ends a text as the training has, and its modules say how a state becomes an embedding."""
    assert (
        AutoTokenizer.from_pretrained(folder)("red cat")["input_ids"][-1]
        == AutoTokenizer.from_pretrained(folder).eos_token_id
    )
    modules = json.loads((folder / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert (pooling["pooling_mode_lasttoken"], pooling["pooling_mode_mean_tokens"]) == (True, False)
    assert pooling["word_embedding_dimension"] == AutoModel.from_pretrained(folder).config.hidden_size
    assert AutoModel.from_pretrained(folder).state_dict().keys() == state.keys()
