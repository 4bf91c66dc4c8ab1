"""metrics.jsonl loses no line of an earlier start; writers on a full disk (/dev/full) say what is wrong."""

import errno
import json
import os
import resource
import sys

import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerControl, TrainerState, TrainingArguments

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.task import TaskName
from hfdist.data.stream.ledger import _append
from hfdist.errors import ResourceError
from hfdist.records import RunFolder, read_lines
from hfdist.records.lines import earlier
from hfdist.run.callbacks.metrics import MetricsWriter, ProgressBar, plot_losses
from hfdist.run.callbacks.traffic import summarize
from hfdist.run.parts.folder import Beginning
from hfdist.run.parts.part import warning_of_failure
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.checkpointing.model_files import _save_tokenizer
from hfdist.trainer.evaluation.loop import describe_figures

LINES = [{"step": step, "loss": 1.0} for step in range(1, 9)]


def test_traffic_is_summed_up_by_those_who_send():
    """A rank may have no axis that the others have, and the others may send nothing along it."""
    data, nothing = {"calls": 3, "kinds": {"all_reduce": 30}}, {"calls": 1, "kinds": {"send": 0}}
    assert summarize([{"data": data}, {"pipeline": nothing}, {"data": {"calls": 1, "kinds": {"all_reduce": 6}}}]) == {
        "data": {"sent_bytes": 30, "mean_bytes": 12, **data},
        "pipeline": {"sent_bytes": 0, "mean_bytes": 0, **nothing},
    }


@pytest.fixture
def path(tmp_path):
    RunFolder(tmp_path).metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return RunFolder(tmp_path).metrics


def begin(folder, step):
    writer = MetricsWriter(RunFolder(folder).metrics)
    writer.on_train_begin(TrainingArguments(str(folder)), TrainerState(global_step=step), TrainerControl())
    return writer


def log(writer, step, **logs):
    writer.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=logs)


def test_a_start_that_is_cut_short_loses_no_lines(path):
    def start(largest_file_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
        begin(path.parent, 6)

    # The lines that move do not fit, or those that stay.
    for largest_file_bytes in (40, 120):
        with pytest.raises(RankFailed, match="File too large"):
            run_ranks(start, 1, largest_file_bytes, group=False)
        assert read_lines(path) == LINES
    run_ranks(start, 1, 2**20, group=False)
    assert read_lines(path) == LINES[:6]
    # Where a start is cut short between the two files, they are in both.
    assert read_lines(earlier(path)) == LINES[6:] * 2


def test_lines_of_an_earlier_life_are_kept_beside(path):
    log(begin(path.parent, 6), 7, loss=2.0)
    assert read_lines(path) == [*LINES[:6], {"step": 7, "loss": 2.0}]
    assert read_lines(earlier(path)) == LINES[6:]
    # Killed before its first checkpoint, or begun anew: the first line of all is of step 0.
    for attempt in range(2):
        log(begin(path.parent, 0), 0, eval_loss=float(attempt))
        assert read_lines(path) == [{"step": 0, "eval_loss": float(attempt)}]
    kept = [*LINES[6:], *LINES[:6], {"step": 7, "loss": 2.0}, {"step": 0, "eval_loss": 0.0}]
    assert read_lines(earlier(path)) == kept
    begin(path.parent, 9).on_rollback(TrainerState(global_step=9))
    assert read_lines(earlier(path)) == kept


NO_LINES = ['{"step": 7, "lo', '{"step": 7, "loss": 1.0}', "3\n", "{}\n", '{"step": "x"}\n', "\udcff\n"]


@pytest.mark.parametrize("line", NO_LINES)
def test_what_is_no_line_is_set_aside(path, line):
    with path.open("a", errors="surrogateescape") as file:
        file.write(line)
    log(begin(path.parent, 8), 9, loss=2.0)
    assert read_lines(path) == [*LINES, {"step": 9, "loss": 2.0}]
    assert earlier(path).read_text() == line.strip().replace("\udcff", "\ufffd") + "\n"


def test_the_line_of_a_save_is_of_the_step_that_was_saved(path):
    writer = begin(path.parent, 8)
    log(writer, 11, **{"checkpoint/step": 10, "checkpoint/bytes": 5})
    log(writer, 11, loss=2.0)
    begin(path.parent, 10)
    assert read_lines(path) == [*LINES, {"step": 10, "checkpoint/step": 10, "checkpoint/bytes": 5}]


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
    full("metrics.jsonl")
    writer, state = MetricsWriter(RunFolder(tmp_path).metrics), TrainerState(is_world_process_zero=True)
    writer.on_train_begin(None, state, TrainerControl())
    with pytest.raises(ResourceError, match="No space left on device") as raised:
        writer.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert raised.value.where == str(RunFolder(tmp_path).metrics)


def test_a_tokenizer(full, tmp_path):
    full("tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(OSError, match="No space left on device") as raised:
        _save_tokenizer(tokenizer, tmp_path)
    assert raised.value.errno == errno.ENOSPC


def test_a_picture_that_does_not_fit_ends_no_run(full, tmp_path, caplog):
    RunFolder(tmp_path).metrics.write_text('{"step": 1, "loss": 2.0, "tokens": 8}\n')
    full("loss.png")
    with warning_of_failure("picture of the losses"):
        plot_losses(RunFolder(tmp_path))
    assert "no picture of the losses: OSError: [Errno 28] No space left on device" in caplog.text


def test_without_matplotlib_the_run_says_what_draws(tmp_path, monkeypatch, caplog):
    RunFolder(tmp_path).metrics.write_text('{"step": 1, "loss": 2.0, "tokens": 8}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level("INFO"):
        plot_losses(RunFolder(tmp_path))
    assert "pip install 'hfdist[plot]'" in caplog.text
    assert not RunFolder(tmp_path).loss_picture.exists()


@pytest.mark.parametrize(
    ("task", "words", "drawn"),
    [
        (TaskName.causal_lm, "loss (nats a token)", [2.0, 1.5]),
        (TaskName.dpo, "loss (mean of pairs)", [2.0, 1.5]),
        (TaskName.grpo, "reward (mean of answers)", [0.25, 0.75]),
    ],
)
def test_the_picture_shows_what_the_task_is_measured_by(tmp_path, monkeypatch, task, words, drawn):
    lines = [{"step": 1, "loss": 2.0, "tokens": 8, "reward": 0.25}, {"step": 1, "eval_loss": 1.5, "eval_reward": 0.75}]
    RunFolder(tmp_path).metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot_losses(RunFolder(tmp_path), task)
    (axes,) = figures[0].axes
    assert axes.get_ylabel() == words
    assert [list(line.get_ydata()) for line in axes.lines] == [[value] for value in drawn]


def test_the_bar_shows_rewards_in_place_of_their_loss(capsys):
    bar, state = ProgressBar(), TrainerState(is_world_process_zero=True, max_steps=2)
    bar.on_train_begin(None, state, TrainerControl())
    for logs in ({"eval_loss": -0.5, "eval_reward": 0.5}, {"loss": 0.125, "reward": 0.25}):
        bar.on_log(None, state, TrainerControl(), logs=logs)
    bar.on_train_end(None, state, TrainerControl())
    shown = capsys.readouterr().err
    assert "held-out=0.500, reward=0.250" in shown
    assert "loss=" not in shown


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"loss": 2.0, "perplexity": 7.4}, "loss 2.0000, perplexity 7.4"),
        (
            {"loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 0.2},
            "loss 0.5000, accuracy 75.0%, margin 0.2000",
        ),
        ({"loss": -0.5, "reward": 0.5, "completion_tokens": 8.0}, "reward 0.5000, tokens of an answer 8.0"),
    ],
)
def test_an_evaluation_is_said_by_what_its_task_is_measured_by(figures, words):
    assert describe_figures({f"test_{name}": value for name, value in figures.items()}, "test") == words


def test_the_ledger_names_its_file(full):
    path = full("lane-00000.records")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        _append(path, b"record")


def test_the_config_in_a_runs_folder_is_replaced_whole(tmp_path):
    """A run that is killed meanwhile leaves the one of before."""
    config = compose_config([f"run.dir={tmp_path}"])
    path = config.run.folder.config
    path.write_text("of an earlier start\n")
    os.link(path, tmp_path / "same")
    Beginning(config, goes_on=True)._begin()
    assert path.read_text() == to_yaml(config)
    assert (tmp_path / "same").read_text() == "of an earlier start\n"
