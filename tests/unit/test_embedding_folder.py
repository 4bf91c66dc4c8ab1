"""The tokenizer of an embedding model's folder ends each text as training does, whatever its class does after one."""

import copy

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfdist.config.data import TextsConfig
from hfdist.data.tokenization.text_encoder import Encoder
from hfdist.errors import ConfigError
from hfdist.tune.embedding_folder import ending_texts
from tests.distributed.trl_runs import make_tokenizer


def plain():
    return make_tokenizer()


def ends_already():
    made = make_tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 1)]
    )
    return made


def begins():
    """With a token in front of each text, as Llama's have, that its class does not know of."""
    made = make_tokenizer()
    front = ("<user>", made.convert_tokens_to_ids("<user>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<user> $A", special_tokens=[front])
    return made


@pytest.mark.parametrize("make", [plain, ends_already, begins])
def test_texts_become_the_tokens_that_they_have_in_training(tmp_path, make):
    tokenizer = make()
    before = tokenizer("red cat")["input_ids"]
    ending = ending_texts(tokenizer, TextsConfig(max_tokens=4))
    assert tokenizer("red cat")["input_ids"] == before
    ending.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("red cat", "then a big bird"):
        assert read(text)["input_ids"] == Encoder(tokenizer).encode([text])[0].tolist()
    cut = read("then a big bird and a dog", truncation=True)["input_ids"]
    assert (len(cut), cut[-1]) == (4, tokenizer.eos_token_id)
    assert read.pad_token is not None


def test_a_tokenizer_that_forgets_it_is_refused():
    class Forgetful(PreTrainedTokenizerFast):
        def save_pretrained(self, folder, **more):
            other = copy.deepcopy(make_tokenizer())
            return other.save_pretrained(folder, **more)

    made = Forgetful(tokenizer_object=make_tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<end>")
    with pytest.raises(ConfigError, match="end each text"):
        ending_texts(made, TextsConfig())
