"""Writers of files on a disk that is full: what they raise can be told to the reader. /dev/full stands for the disk."""

import errno

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerControl, TrainerState

from hfdist.data.stream.ledger import _append
from hfdist.errors import ResourceError
from hfdist.trainer.checkpointing.model_files import _save_tokenizer
from hfdist.trainer.reporting.callbacks import METRICS, MetricsWriter
from hfdist.trainer.run.end_of_run import _report_losses


@pytest.fixture
def full(tmp_path):
    """Makes a file on the full disk."""

    def make(name):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to("/dev/full")
        return path

    return make


def test_a_line_of_the_metrics(full, tmp_path):
    full(METRICS)
    writer, state = MetricsWriter(tmp_path), TrainerState(is_world_process_zero=True)
    writer.on_train_begin(None, state, TrainerControl())
    with pytest.raises(ResourceError, match="No space left on device") as raised:
        writer.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert raised.value.where == str(tmp_path / METRICS)


def test_a_tokenizer(full, tmp_path):
    full("tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(OSError, match="No space left on device") as raised:
        _save_tokenizer(tokenizer, tmp_path)
    assert raised.value.errno == errno.ENOSPC


def test_a_picture_that_does_not_fit_ends_no_run(full, tmp_path, caplog):
    (tmp_path / METRICS).write_text('{"step": 1, "loss": 2.0, "tokens": 8}\n')
    full("loss.png")
    _report_losses(tmp_path)
    assert "no picture of the losses: [Errno 28] No space left on device" in caplog.text


def test_the_ledger_names_its_file(full):
    path = full("lane-00000.records")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        _append(path, b"record")
