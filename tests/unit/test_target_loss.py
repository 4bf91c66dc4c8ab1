"""The loss of targets in transformers' types of encoder-decoders, what refuses a type, and greedy targets."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MBartConfig, MBartTokenizer
from transformers.models.mbart.modeling_mbart import shift_tokens_right

from hfdist.config.model import Init, ModelConfig
from hfdist.config.task import Head
from hfdist.errors import ConfigError
from hfdist.models.flops import flops_per_token, measure_size
from hfdist.models.target_loss import check_target_loss, pad_pairs, sum_target_losses
from hfdist.topology import Topology
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.targets import write_targets
from hfdist.trainer.step.throughput import Throughput
from hfdist.tune.fit_model import fit_model
from hfdist.tune.seq2seq import SequenceToSequence
from tests.marks import many

FAMILIES = ("bart", "blenderbot", "blenderbot-small", "led", "longt5", "marian", "mbart", "mt5", "mvp", "pegasus",
            "pegasus_x", "plbart", "t5", "t5gemma", "umt5")  # fmt: skip
ALWAYS = ("bart", "mbart", "t5")


@pytest.mark.parametrize("kind", [one if one in ALWAYS else many(one) for one in FAMILIES])
def test_the_loss_of_a_type_is_the_sum_over_its_targets(kind):
    check_target_loss(ModelConfig(type=kind, init=Init.random), AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        # Its own loss is of n-grams.
        ("prophetnet", {}, "its own loss is"),
        ("bart", {"decoder_start_token_id": None}, "null"),
        ("m2m_100", {"encoder_layerdrop": 0.05}, "0.05"),
    ],
)
def test_a_type_whose_loss_is_another_one_is_refused(kind, fields, found):
    architecture = AutoConfig.for_model(kind)
    for name, value in fields.items():
        setattr(architecture, name, value)
    with pytest.raises(ConfigError) as raised:
        check_target_loss(ModelConfig(name="FOLDER", init=Init.pretrained), architecture)
    assert found in str(raised.value)


def make_model(factor=1.0):
    """Of MT5; with a large factor its greedy targets have many different tokens."""
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 40}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = AutoConfig.for_model("mt5", **shape, **ids, tie_word_embeddings=False, initializer_factor=factor)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


ROWS = [[[5, 6, 7, 1], [8, 9, 1]], [[3, 1], [4, 4, 4, 4, 1]], [[9, 8, 7, 6, 5, 4, 1], [2, 1]]]


def test_rows_in_any_batches_have_the_same_loss_and_gradients():
    model = make_model()

    def grads(batches):
        model.zero_grad()
        total = sum(sum_target_losses(model, pad_pairs([[torch.tensor(s) for s in row] for row in b])) for b in batches)
        total.backward()
        return total.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    (together, grad), (apart, other) = grads([ROWS]), grads([[row] for row in ROWS])
    assert together == pytest.approx(float(apart), rel=1e-6)
    assert float((grad - other).norm() / grad.norm()) < 1e-5


def test_a_row_is_parted_where_its_targets_begin():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 1], [9, 4, 1, 0, 0], [3, 0, 0, 0, 0]]),
        "labels": torch.tensor([[-100, -100, 7, 8, 1], [-100, 4, 1, -100, -100], [-100] * 5]),
    }
    prepared = SequenceToSequence().prepare(batch)
    assert prepared["input_ids"].tolist() == [[5, 6], [9, 0], [3, 0]]
    assert prepared["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert prepared["labels"].tolist() == [[7, 8, 1], [4, 1, -100], [-100] * 3]
    assert int(SequenceToSequence().count(batch)) == int(SequenceToSequence().count(prepared)) == 5


def test_a_batch_counts_the_operations_of_both_sides():
    model, throughput = make_model(5.0), Throughput(torch.device("cpu"))
    count = partial(flops_per_token, model.config, measure_size(model))
    throughput.start(0, 0, count, num_devices=1)
    options = SimpleNamespace(objective=SequenceToSequence())
    trainer = SimpleNamespace(engine=object(), model=model, options=options, throughput=throughput)
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 3, dtype=torch.long)}
    assert EngineTrainer.floating_point_ops(trainer, batch) == round(2 * (6 + 3) * count(6, 3))


def test_a_type_without_a_start_token_begins_as_in_training():
    tokenizer = MBartTokenizer()
    tokenizer.tgt_lang = "de_DE"
    config = MBartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)
    fit_model(model, tokenizer, Head.targets)
    labels = torch.tensor([tokenizer(text_target="a b")["input_ids"]])
    read = shift_tokens_right(labels, config.pad_token_id)
    assert model.generation_config.decoder_start_token_id == int(read[0, 0]) == tokenizer.convert_tokens_to_ids("de_DE")


def test_greedy_targets_are_those_of_generate():
    model = make_model(5.0)
    sources = [source for source, _ in ROWS]
    limits = GenerationLimits(max_new_tokens=8, end_ids=frozenset({1}), most_tokens=None)
    with torch.no_grad():
        found = write_targets(
            sources, lambda batch, function: [function(model, batch)], limits,
            model=model, topology=Topology(), rows_at_once=2,
        )  # fmt: skip
        for source, own in zip(sources, found, strict=True):
            ids = model.generate(torch.tensor([source]), max_new_tokens=8, do_sample=False)[0, 1:].tolist()
            assert own == (ids[: ids.index(1)] if 1 in ids else ids)
    assert len({tuple(own) for own in found}) > 1
