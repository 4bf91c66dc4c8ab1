"""What is hidden from a model, or left out of what it reads: BERT's shares, T5's spans, and who draws them."""

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig
from hfdist.data.packing.sequence import ORIGINS
from hfdist.errors import ConfigError
from hfdist.tune.masked import MaskedTokens, check_mask_token
from hfdist.tune.span_corruption import SpanCorruption, draw_spans, find_sentinels
from tests.distributed import encoder_runs, trl_runs

END, SENTINELS = 1, 6
WORD = 5
"""The first token that is a word."""


@pytest.fixture(scope="module")
def masks():
    return MaskedTokens(TaskConfig(), 3, encoder_runs.make_tokenizer())


def make_tokenizer():
    tokenizer = trl_runs.make_tokenizer()
    tokenizer.add_tokens([f"<extra_id_{number}>" for number in reversed(range(SENTINELS))], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def spans():
    return SpanCorruption(TaskConfig(), 3, make_tokenizer(), sequence_length=40)


def batch_of(*rows, epoch=0):
    """Rows of documents, each a number and its tokens, filled up with tokens that are no document's."""
    length = max(sum(len(ids) for _, ids in row) for row in rows) + 2
    ids, pieces = np.full((len(rows), length), 7), torch.zeros(len(rows), max(map(len, rows)), 4, dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for place, (document, tokens) in enumerate(row):
            ids[number, start : start + len(tokens)] = tokens
            pieces[number, place] = torch.tensor([document, epoch, 0, len(tokens)])
            start += len(tokens)
    return {"input_ids": torch.from_numpy(ids), ORIGINS: pieces, "labels": torch.from_numpy(ids.copy())}


FIRST, SECOND = (4, [2, 6, 7, 8, 9, 10, 3]), (9, [2, 11, 12, 13, 3])


def rows_of(prepared):
    return [
        (ids[mask > 0].tolist(), own[mask > 0].tolist())
        for ids, mask, own in zip(*(prepared[k] for k in ("input_ids", "attention_mask", "labels")), strict=True)
    ]


def test_a_document_draws_the_same_wherever_it_stands(masks):
    together = rows_of(masks.prepare(batch_of([FIRST, SECOND])))
    assert together == rows_of(masks.prepare(batch_of([FIRST]))) + rows_of(masks.prepare(batch_of([SECOND])))
    long = (0, list(range(WORD, 20)) * 20)
    drawn = [rows_of(masks.prepare(batch_of([long], epoch=epoch))) for epoch in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    other = MaskedTokens(TaskConfig(), 4, encoder_runs.make_tokenizer())
    assert rows_of(other.prepare(batch_of([long]))) != drawn[0]


def test_a_batch_of_nothing_is_read_and_has_no_label(masks, spans):
    """Of quarantined documents, and of rows that only fill up."""
    batch = batch_of([FIRST, SECOND])
    for objective in (masks, spans):
        prepared = objective.prepare(batch | {"labels": torch.full_like(batch["labels"], IGNORED)})
        assert int(objective.count(prepared)) == 0
        assert prepared["input_ids"].shape[0] == prepared["attention_mask"].sum() == 1


def shares(read, labels, ids, mask_id):
    """Of tokens but special ones: hidden; of these: masked, changed, kept."""
    is_hidden = labels != IGNORED
    assert (labels[is_hidden] == ids[is_hidden]).all()
    assert (read[~is_hidden] == ids[~is_hidden]).all()
    own = read[is_hidden]
    counts = [(own == mask_id), (own != mask_id) & (own != ids[is_hidden]), own == ids[is_hidden]]
    assert not is_hidden[ids < WORD].any()
    return [is_hidden[ids >= WORD].mean(), *(one.mean() for one in counts)]


def test_shares_are_those_of_transformers_collator(masks):
    tokenizer = encoder_runs.make_tokenizer()
    ids = np.array([2, *range(WORD, 20), 3] * 4000)
    read, labels = masks.hide(ids, np.random.default_rng(0))
    torch.manual_seed(0)
    theirs = DataCollatorForLanguageModeling(tokenizer)([{"input_ids": ids.tolist()}])
    wanted = shares(theirs["input_ids"][0].numpy(), theirs["labels"][0].numpy(), ids, tokenizer.mask_token_id)
    assert shares(read, labels, ids, tokenizer.mask_token_id) == pytest.approx(wanted, abs=0.015)


def test_keys_are_the_shares():
    task = TaskConfig(mlm_probability=0.5, mask_replace_prob=0.0, random_replace_prob=0.0)
    ids = np.arange(WORD, 20).repeat(500)
    read, labels = MaskedTokens(task, 0, encoder_runs.make_tokenizer()).hide(ids, np.random.default_rng(0))
    assert (read == ids).all()
    assert (labels != IGNORED).mean() == pytest.approx(0.5, abs=0.03)


def test_a_tokenizer_without_a_mask_token_is_refused():
    with pytest.raises(ConfigError, match="no mask token"):
        check_mask_token(trl_runs.make_tokenizer())


@pytest.mark.parametrize(
    ("num_tokens", "density", "mean", "counted"),
    [
        # T5's own of 512 tokens: 77 are left out, in 26 spans.
        (512, 0.15, 3.0, (77, 26)),
        (2, 0.15, 3.0, (1, 1)),
        (3, 0.9, 1.0, (2, 1)),
        (10, 0.5, 1.0, (5, 5)),
    ],
)
def test_numbers_of_spans_are_those_of_t5(num_tokens, density, mean, counted):
    task = TaskConfig(noise_density=density, mean_noise_span_length=mean)
    assert task.count_spans(num_tokens) == counted
    drawn = draw_spans(num_tokens, task, np.random.default_rng(0))
    borders = [0, *(place for span in drawn for place in span)]
    # Each span, and what stands before it, has a token or more; a document ends with what is left out.
    assert (np.diff(borders) > 0).all()
    assert (sum(stop - start for start, stop in drawn), len(drawn)) == counted
    assert borders[-1] == num_tokens


def test_every_way_to_part_is_as_likely():
    task, generator = TaskConfig(noise_density=0.5, mean_noise_span_length=2.0), np.random.default_rng(0)
    drawn = [tuple(draw_spans(8, task, generator)) for _ in range(9000)]
    counts = {one: drawn.count(one) for one in set(drawn)}
    # Four tokens in two parts: three ways, of what is kept and of what is left out.
    assert len(counts) == 9
    assert all(900 < count < 1100 for count in counts.values())


def test_the_source_and_the_target_are_the_document(spans):
    text = list(range(WORD, 20)) * 2
    source, target = spans.corrupt(np.array([*text, END]), np.random.default_rng(0))
    first = make_tokenizer().convert_tokens_to_ids("<extra_id_0>")
    order = make_tokenizer().convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(SENTINELS)])
    assert (source[-1], target[-1], target[0]) == (END, END, first)
    left_out, sentinel = {}, None
    for token in target[:-1].tolist():
        if token in order:
            sentinel = token
            left_out[sentinel] = []
        else:
            left_out[sentinel].append(token)
    assert list(left_out) == order[: len(left_out)]
    assert [t for token in source[:-1].tolist() for t in left_out.get(token, [token])] == text
    assert sum(map(len, left_out.values())) == round(0.15 * len(text))


def test_a_very_short_document_has_no_target(spans):
    source, target = spans.corrupt(np.array([WORD, END]), np.random.default_rng(0))
    assert (source.tolist(), target.tolist()) == ([WORD, END], [])


def test_too_few_sentinels_are_refused_with_a_length_that_fits():
    with pytest.raises(ConfigError) as refused:
        find_sentinels(make_tokenizer(), TaskConfig(), 4096)
    length = int(refused.value.hint.partition("=")[2])
    assert len(find_sentinels(make_tokenizer(), TaskConfig(), length)) == SENTINELS
    with pytest.raises(ConfigError):
        find_sentinels(make_tokenizer(), TaskConfig(), length + 20)
    with pytest.raises(ConfigError, match="T5's"):
        find_sentinels(trl_runs.make_tokenizer(), TaskConfig(), 16)
