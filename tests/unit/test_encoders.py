"""Encoders are found by trying a small model, and texts of packed rows are read each by itself."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hfdist.config.task import Head, Pooling
from hfdist.errors import ConfigError
from hfdist.models import encoders
from hfdist.models.encoders import check_reads_no_further, check_reads_texts, takes_texts_apart
from hfdist.models.shrink import shrink
from hfdist.models.texts_apart import TextsApart
from hfdist.tune.embedding_folder import read_pooling

ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert", "mpnet", "nomic_bert",
            "roberta", "xlm-roberta")  # fmt: skip


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_read_padded_texts_as_they_read_each_alone(kind):
    architecture = AutoConfig.for_model(kind)
    for head in (Head.none, Head.labels, Head.token_labels):
        assert check_reads_texts(architecture, head=head, longest=64)


def test_decoders_are_none():
    architecture = AutoConfig.for_model("llama")
    for head in (Head.none, Head.labels):
        assert not check_reads_texts(architecture, head=head, longest=64)


@pytest.mark.parametrize(
    ("kind", "head", "said"),
    [
        ("fnet", Head.labels, "a text says something else beside longer ones"),
        ("ibert", Head.masked, "saves statistics of what a process reads"),
        ("vit", Head.none, "a small model cannot read texts"),
        ("t5", Head.none, "reads a text only beside a target"),
    ],
)
def test_types_that_are_not_exact_are_refused(kind, head, said):
    with pytest.raises(ConfigError, match=said):
        check_reads_texts(AutoConfig.for_model(kind), head=head, longest=64)


def test_what_is_no_number_beside_longer_texts_is_a_difference():
    def forget_short_texts(module, args, named, output):
        if "attention_mask" in named:
            output.last_hidden_state[named["attention_mask"][:, 5] == 0] = torch.nan

    model = AutoModel.from_config(shrink(AutoConfig.for_model("bert"))).eval()
    assert encoders._differ_by_padding(model) <= encoders.BOUND
    model.register_forward_hook(forget_short_texts, with_kwargs=True)
    assert not encoders._differ_by_padding(model) <= encoders.BOUND


def test_positions_that_no_token_has_do_not_count():
    architecture = AutoConfig.for_model("roberta", max_position_embeddings=514, pad_token_id=1)
    assert check_reads_texts(architecture, head=Head.labels, longest=512)
    with pytest.raises(ConfigError, match="<= 512"):
        check_reads_texts(architecture, head=Head.labels, longest=513)


def test_models_with_labels_and_encoders_take_texts_apart():
    bert, llama = (AutoModel.from_config(shrink(AutoConfig.for_model(kind))) for kind in ("bert", "llama"))
    assert takes_texts_apart(bert, Head.none)
    assert not takes_texts_apart(llama, Head.none)
    assert takes_texts_apart(llama, Head.labels)


def test_next_tokens_are_not_learned_by_models_that_see_them():
    for kind in ("llama", "gpt2"):
        check_reads_no_further(AutoConfig.for_model(kind))
    check_reads_no_further(AutoConfig.for_model("bert", is_decoder=True))
    with pytest.raises(ConfigError, match="sees the next ones") as refused:
        check_reads_no_further(AutoConfig.for_model("bert"))
    assert "model.config.is_decoder=true" in refused.value.hint


@pytest.mark.parametrize("head", [Head.none, Head.labels])
def test_an_encoder_decoder_that_reads_beside_a_target_is_named_so(head):
    with pytest.raises(ConfigError, match="only beside a target"):
        check_reads_texts(AutoConfig.for_model("t5"), head=head, longest=16)


def test_texts_go_apart_and_back():
    values = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]])
    is_first = torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 1, 0]]).bool()
    texts = TextsApart.of(is_first, values < 9)
    assert texts.take_apart(values, fill=-1).tolist() == [[1, 2, 3], [4, 5, -1], [6, 7, 8]]
    assert texts.mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert texts.put_back(texts.take_apart(values), 10).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    nothing = TextsApart.of(is_first, values < 0)
    assert nothing.take_apart(values).tolist() == [[1]]


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}', Pooling.cls),
        ('{"pooling_mode": "mean"}', Pooling.mean),
        ('{"pooling_mode_lasttoken": true}', Pooling.last),
        ("[", None),
        ("[]", None),
    ],
)
def test_a_folder_says_its_pooling(tmp_path, content, pooling):
    assert read_pooling(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(content)
    assert read_pooling(tmp_path) is pooling


def test_pooling_that_is_not_trained_here_is_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ConfigError, match="pooling_mode_max_tokens"):
        read_pooling(tmp_path)
