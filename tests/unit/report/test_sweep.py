"""A sweep on the page: its best trials, all of them as lines, and nothing of a file that could run."""

import json
import re

import pytest

from hfdist.errors import ConfigError
from hfdist.tools.report import command
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.sweep import read_trials, sweep


def write_sweep(folder, trials, **settings):
    """Trials: values, and the results of their rungs, or a failure."""
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"metric": "eval_loss", "sampler": "tpe", "rungs": 2, **settings}))
    lines = []
    for number, (values, results) in enumerate(trials):
        lines.append({"trial": number, "values": values})
        if isinstance(results, str):
            lines.append({"trial": number, "failed": results})
            continue
        for rung, value in enumerate(results):
            lines.append({"trial": number, "rung": rung, "step": rung, "tokens": 100 * 3**rung, "value": value})
            run = folder / f"trial-{number:04d}"
            run.mkdir(exist_ok=True)
            (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "eval_loss": 2.5}\n')
    (folder / "sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


TRIALS = [
    ({"optimizer.lr": 1e-4, "strategy": "ddp"}, [3.0]),
    ({"optimizer.lr": 1e-3, "strategy": "zero1"}, [2.5, 2.2]),
    ({"optimizer.lr": 1e-1, "strategy": "<script>alert(1)</script>"}, [2.0]),
    ({"optimizer.lr": 1e-2, "strategy": "ddp"}, "the loss is <b>not</b> finite"),
    ({"optimizer.lr": 2e-2, "strategy": "ddp"}, [None]),
]


def test_the_furthest_and_best_come_first_and_each_is_a_line(tmp_path):
    folder = write_sweep(tmp_path / "sweep", TRIALS)
    assert [trial.number for trial in read_trials(folder)] == [1, 2, 0, 4, 3]
    html = sweep(folder)
    assert "5 trials, 1 failed, tpe" in html
    assert "Best: trial 1, eval_loss 2.20: <code>optimizer.lr=0.001 strategy=zero1</code>" in html
    assert html.count("<polyline") == 3
    assert html.count('class="line c0"') == 1
    assert "<script" not in html
    assert "<b>" not in html
    other = write_sweep(tmp_path / "other", TRIALS, direction="maximize")
    assert [trial.number for trial in read_trials(other)] == [1, 0, 2, 4, 3]


def test_a_value_that_is_null_has_its_place_on_a_line(tmp_path):
    values = [{"optimizer.lr": 1e-3, "train.max_grad_norm": None}, {"optimizer.lr": 1e-2, "train.max_grad_norm": 1.0}]
    html = sweep(write_sweep(tmp_path / "sweep", [(one, [2.0]) for one in values]))
    assert [len(points.split()) for points in re.findall(r'<polyline [^>]*points="([^"]*)"', html)] == [3, 3]


def test_the_metric_stands_over_each_swept_value(tmp_path):
    html = sweep(write_sweep(tmp_path / "sweep", TRIALS))
    rates, names = html.split('<figure class="chart">')[1:3]
    assert "<h3>eval_loss by optimizer.lr</h3>" in rates
    assert 'data-logx="1"' in rates
    # Two trials and the best one, over the logarithms of their rates, from the lowest.
    assert re.findall(r' d="([^"]+)"', rates) == ["M-4 3h0M-1 2h0", "M-3 2.2h0"]
    assert all(f">{label}</text>" in rates for label in ("0.0001", "0.001", "0.1"))
    assert ">zero1</text>" in names
    assert "&lt;script&gt;" in names
    one = write_sweep(tmp_path / "one", [({"train.seed": seed}, [2.0 + seed]) for seed in (1, 2)])
    assert "<polyline" not in sweep(one), "of one value, the plain plot says it"
    assert 'data-logx="0"' in sweep(one)
    nothing = write_sweep(tmp_path / "nothing", [({"train.seed": None}, [2.0]), ({"train.seed": None}, [1.0])])
    assert "<figure" not in sweep(nothing)


@pytest.mark.parametrize(
    "line",
    ['{"trial": "x", "values": {}}', '{"trial": 9, "value": 1}', '{"trial": 0, "values": 3}', "{", "[1]",
     '{"trial": 0, "tokens": "many", "value": "good"}', '{"trial": 0, "value": 1e999}',
     '{"trial": 5, "values": [[1, 2]]}', json.dumps({"trial": 0, "step": 1, "tokens": 10**400, "value": 1.0}),
     '{"trial": 0, "rung": 1, "step": 1, "tokens": 1, "value": -1.7e308}'],
)  # fmt: skip
def test_lines_of_any_kind_are_no_error(tmp_path, line):
    folder = write_sweep(tmp_path / "sweep", TRIALS)
    with (folder / "sweep.jsonl").open("a") as file:
        file.write(f'{line}\n{{"trial": 1, "rung": 2, "step": 1, "tokens": 1, "value": 1.7e308}}\n')
    (folder / "sweep.json").write_text("[")
    assert "5 trials" in sweep(folder)


def test_the_command_shows_the_best_trials_of_a_sweep(tmp_path):
    folder = write_sweep(tmp_path / "sweep", TRIALS)
    request = command.parse_request([str(folder), f"out={tmp_path}/page.html"])
    assert [path.name for path in request.folders] == ["trial-0001", "trial-0002", "trial-0000", "trial-0004"]
    command.write([RunFiles(run) for run in request.folders], request.out, request.sweeps)
    page = request.out.read_text()
    assert '<section id="sweep-0"><h2>Sweep' in page
    assert page.index("<h2>Sweep") < page.index('<section id="heads">')
    empty = write_sweep(tmp_path / "empty", [])
    assert sweep(empty) == ""
    with pytest.raises(ConfigError, match="no trial of this sweep has begun"):
        command.parse_request([str(empty)])
