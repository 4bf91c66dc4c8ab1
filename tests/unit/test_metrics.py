"""metrics.jsonl outlives a start that comes to its end too soon."""

import json
import resource

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.callbacks import METRICS, MetricsWriter, read_metrics


def test_a_start_that_is_cut_short_loses_no_lines(tmp_path):
    lines = [{"step": step, "loss": 1.0} for step in range(1, 9)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(largest_file_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, largest_file_bytes))
        state = TrainerState(global_step=6)
        MetricsWriter(tmp_path).on_train_begin(TrainingArguments(str(tmp_path)), state, TrainerControl())

    with pytest.raises(RankFailed, match="File too large"):
        run_ranks(start, 1, 40, group=False)
    assert read_metrics(tmp_path / METRICS) == lines
    run_ranks(start, 1, 2**20, group=False)
    assert read_metrics(tmp_path / METRICS) == lines[:6]
