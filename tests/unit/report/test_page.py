"""The page: everything that a run says is in it, as text alone; it asks nobody for anything, and it stays small."""

import itertools
import json
import math
import re
from html import unescape

import pytest

from hfdist.tools.report import compare, curves
from hfdist.tools.report.drawing.axis import linear, logarithmic
from hfdist.tools.report.drawing.chart import Chart, Curve, draw
from hfdist.tools.report.event_marks import find_marks
from hfdist.tools.report.page import page, parts
from hfdist.tools.report.reading.run_files import RunFiles
from tests.marks import many
from tests.unit.report.folders import SENT, SPIKES, event, rank_line, record, rewarded_line, training_line, write_run
from tests.unit.report.test_sweep import write_sweep

HOSTILE = '<script>alert("1")</script>\u202e\x00\ud800&amp;\'"><img src=x onerror=alert(1)>'
SAVES = [event("save", 20 + number, step=10 * number, bytes=2e9, seconds=3, stall_seconds=0.2) for number in (1, 2)]


def read(folder):
    run = RunFiles(folder)
    run.read()
    return run


def html(*folders):
    runs = [read(folder) for folder in folders]
    return page(runs, parts(runs))


def text_of(content):
    return re.sub(r"<[^>]*>", " ", content)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """100,000 steps of 64 ranks."""
    folder = tmp_path_factory.mktemp("long")
    alerts = [event("alert", 30, step=997 * number, kind="spike", text="the loss is high") for number in range(100)]
    return write_run(
        folder,
        lines=[training_line(step) for step in range(1, 100_001)],
        events=[event("start", 1), *alerts, *SAVES],
        ranks=[rank_line(step, slow={5}, num_ranks=64) for step in range(100, 100_001, 100)],
        samples=[{"step": step, "prompt": "def ", "text": "x" * 5000} for step in range(0, 100_000, 1000)],
    )


def test_a_long_run_is_a_small_page_with_all_its_spikes(long_run):
    content = html(long_run)
    assert len(content.encode()) < 300_000
    for spike in SPIKES.values():
        assert re.search(rf" {spike:g}[ \"]", content), spike


def test_a_page_of_many_runs_is_small(tmp_path):
    lines = [training_line(step) for step in range(1, 1501)]
    ranks = [rank_line(step, slow={step % 64}, num_ranks=64) for step in range(1, 97)]
    for number in range(4):
        write_run(tmp_path / str(number), lines=lines, ranks=ranks)
    runs = [read(tmp_path / str(number)) for number in range(4)]
    assert len(page(runs * 6, parts(runs * 6)).encode()) < 300_000
    values = [{f"optimizer.key{key}": math.sin(9 * key + trial) for key in range(8)} for trial in range(320)]
    sweeps = [write_sweep(tmp_path / "sweep", [(own, [2.0 + own["optimizer.key1"]]) for own in values])]
    for num_runs, has_charts in ((12, True), (24, False)):
        own = [*runs * 6][:num_runs]
        content = page(own, parts(own, sweeps))
        assert len(content.encode()) < 300_000
        assert ("Gradient norm" in content) == has_charts
    content = page(runs, parts(runs, sweeps * 4))
    assert len(content.encode()) < 300_000
    assert "The report of sweep alone has its trials" in content


def test_a_page_of_one_run_is_small_whatever_it_has(tmp_path):
    """Characters of some languages are three bytes each."""
    long = [{"step": step, "prompt": f"{step % 8}{'字' * 2000}", "text": "字" * 2000} for step in range(100)]
    spans = [
        {"ph": "X", "tid": rank, "cat": kind, "ts": 4e3 * number + 137.3, "dur": 1234.567, "args": {"microbatch": 7}}
        for rank in range(8)
        for number in range(250)
        for kind in ("forward", "backward")
    ]
    lines, ranks = (
        [training_line(step) for step in range(1, 2001)],
        [rank_line(step, num_ranks=64) for step in range(9)],
    )
    write_run(tmp_path, lines=lines, ranks=ranks, samples=long, rollouts=[line | {"reward": 1.0} for line in long])
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": spans}))
    content = html(tmp_path)
    assert len(content.encode()) < 300_000
    assert "would make this page too large: see timeline.json" in content
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "rollouts.jsonl").unlink()
    content = html(tmp_path)
    assert len(content.encode()) < 300_000
    assert "2,000 actions are not drawn" in content
    assert {*re.findall(r"M[\d.]+ (\d)\.08h", content)} == {*map(str, range(8))}


def test_an_episode_is_shown_as_a_conversation(tmp_path):
    call = '<tool_call>{"name": "calculator"}</tool_call>'
    turns = [
        {"role": "assistant", "text": call, "name": ""},
        {"role": "tool", "text": "4731", "name": "calculator"},
        *[{"role": "assistant", "text": "so", "name": ""}] * 9,
    ]
    answers = [{"step": 1, "prompt": "57*83=", "text": "so", "turns": turns, "reward": 1.0}]
    write_run(tmp_path / "a", lines=[rewarded_line(1)], rollouts=answers, task="grpo")
    write_run(tmp_path / "b", lines=[rewarded_line(1)], rollouts=answers, task="grpo")
    for content in (html(tmp_path / "a"), html(tmp_path / "a", tmp_path / "b")):
        assert '<small>tool calculator</small><pre class="observed">4731</pre>' in content
        assert "<small>assistant</small><pre>&lt;tool_call&gt;" in content
        assert "3 more turns" in content


def test_pages_of_runs_by_rewards_are_small(tmp_path):
    turns = [{"role": "assistant", "text": "x" * 5000}] * 50
    texts = {"prompt": "p" * 5000, "text": "x" * 5000, "turns": turns}
    answers = [{"step": step, **texts, "reward": 1.0} for step in range(24)]
    for name, num_steps in (("long", 6_000), ("a", 1500)):
        lines = [rewarded_line(step) for step in range(1, num_steps + 1)]
        lines += [{"step": step, "eval_loss": -0.5, "eval_reward": 0.5} for step in range(0, num_steps, 50)]
        ranks = [rank_line(step, num_ranks=64) for step in range(1, 97)]
        write_run(tmp_path / name, lines=lines, rollouts=answers, ranks=ranks, task="grpo")
    assert len(html(tmp_path / "long").encode()) < 300_000
    runs = [read(tmp_path / "a")] * 24
    content = page(runs, parts(runs))
    assert len(content.encode()) < 300_000
    assert re.search(r"A page of fewer runs has \d more charts", content)


def test_it_asks_nobody_for_anything(tmp_path):
    content = html(write_run(tmp_path, events=SAVES, ranks=[rank_line(1), rank_line(2)]))
    assert not re.search(r"https?:|//\w|@import|url\(", re.sub(r"\s//.*", "", content))
    assert {*re.findall(r'(?:src|href)="([^"]*)"', content)} == {"data:,"}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', content)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    # What the policy would not let the browser use.
    assert not re.search(r"<[^>]* (?:style|on\w+)=", content)


def test_texts_of_a_run_are_text_alone(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    config = f"run: {{name: x}}\nnote: {json.dumps(HOSTILE)}\n"
    for name, note in ((folder, config), (tmp_path / "other", "run: {name: y}\nnote: other\n")):
        write_run(
            name,
            lines=[
                *(training_line(step) for step in range(1, 9)),
                {"step": 8, f"data/{HOSTILE}/share": 1.0, f"eval_{HOSTILE}_loss": 2.0, f"eval_rewards/{HOSTILE}": 2.0},
            ],
            events=[
                event("start", 1, host=HOSTILE, layout={HOSTILE: 2, "sharding": HOSTILE}),
                event("alert", 2, step=3, kind=HOSTILE, text=HOSTILE),
                event("resume", 3, step=4, checkpoint=HOSTILE, changes=[HOSTILE]),
                event(HOSTILE, 4, step=4),
                event("lost_rank", 5, found=HOSTILE),
                event("end", 6, step=8, state="failed", exit_code=HOSTILE, error=HOSTILE),
            ],
            ranks=[rank_line(step, slow={1}) for step in range(1, 9)],
            samples=[{"step": 1, "prompt": HOSTILE, "text": HOSTILE}],
            rollouts=[
                {"step": 1, "prompt": HOSTILE, "text": HOSTILE, "reward": 1.0, f"rewards/{HOSTILE}": 1.0},
                {"step": 1, "prompt": "p", "turns": [{"role": HOSTILE, "name": HOSTILE, "text": HOSTILE}]},
            ],
            state="failed",
            error=HOSTILE,
            hosts=[HOSTILE] * 4,
            versions={HOSTILE: HOSTILE},
            layout={HOSTILE: 3},
        )
        (name / "config.yaml").write_text(note)
    alone, together = html(folder), html(folder, tmp_path / "other")
    for content in (alone, together):
        assert content.count("<script>") == content.count("<script") == 1
        assert "<img" not in content
        assert not {*"\u202e\x00\ud800"} & {*content}
        assert "&lt;script&gt;alert(1)&lt;" in content
        # All quotes inside tags are those of attributes.
        assert not re.search(r"<\w[^>]*alert\(\"", content)
        content.encode()
    assert "&lt;img src=x onerror=alert(1)&gt;" in alone


PLANNED = {
    "traffic": [{"axis": "data", "sent_bytes": 1 << 20}, {"axis": "data", "sent_bytes": 1 << 20}],
    "time": {"compute": 0.5, "bubble": 0.1, "exposed": {"data": 0.2, "tensor": 0.0}},
}
NASTY = (None, True, -1, 1e308, 10**400, float("nan"), "x", [], [None], [{}], {}, {"a": []}, [1e99] * 3, "2026-01-01")


KINDS = ["record", "traffic", "planned", "metrics", "events", "ranks", "samples", "rollouts", "timeline"]


# By default each kind of file has each value in some key, and each key has some value.
@pytest.mark.parametrize("has_all", [False, many(True)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_a_file_breaks_it(tmp_path, kind, has_all):
    whole = {
        "record": [write_run(tmp_path / "whole") / "run.json"],
        "metrics": training_line(3)
        | {"eval_loss": 2.0, "data/all/share": 1.0, "reward": 1.0, "rewards/a": 1.0, "eval_accuracies": 0.5},
        "events": event("end", 5, step=3, state="failed", exit_code=2, error="x")
        | {"bytes": 1, "seconds": 1, "stall_seconds": 1, "layout": {}, "changes": [], "kind": "x", "text": "y"},
        "ranks": rank_line(3),
        "samples": {"step": 1, "prompt": "a", "text": "b"},
        "rollouts": {"step": 1, "prompt": "a", "text": "b", "turns": [{"role": "x"}], "reward": 1.0, "rewards/a": 1.0},
        "traffic": SENT | {"axes": {}, "step": 4},
        "planned": {"traffic": [PLANNED["traffic"][0]], "time": PLANNED["time"], "axis": "data", "sent_bytes": 1}
        | PLANNED["time"],
        "timeline": {"ph": "X", "tid": 0, "cat": "forward", "ts": 1.0, "dur": 2.0, "args": {"microbatch": 0}},
    }[kind]
    if kind == "record":
        whole = json.loads(whole[0].read_text())
    folder = tmp_path / "run"
    some = itertools.islice(zip(itertools.cycle(whole), itertools.cycle(NASTY)), max(len(whole), len(NASTY)))
    for key, value in itertools.product(whole, NASTY) if has_all else some:
        broken = whole | {key: value}
        own = {"lines": [training_line(1), training_line(2)]}
        if kind in ("ranks", "samples", "rollouts"):
            own[kind] = [broken, whole, broken]
        if kind == "metrics":
            own["lines"] = [training_line(2), broken, training_line(5)]
        if kind == "events":
            own["events"] = [
                broken | {"event": name} for name in ("start", "save", "resume", "alert", "skip", "end", "budget")
            ]
        write_run(folder, **own)
        if kind == "record":
            (folder / "run.json").write_text(json.dumps(broken))
        if kind == "traffic":
            traffic = {"axes": {"data": broken, HOSTILE: value}, "step": 4} if key in SENT else broken
            (folder / "run.json").write_text(json.dumps(record(traffic=traffic)))
        if kind == "planned":
            time = {"time": broken} if key in PLANNED["time"] else {}
            (folder / "plan.json").write_text(json.dumps(broken | {"traffic": [broken, value]} | time))
        if kind == "timeline":
            (folder / "timeline.json").write_text(json.dumps({"traceEvents": [whole, broken]}))
        content = html(folder)
        assert "</html>" in content
        assert not re.search(r"nan|inf[^o]", " ".join(re.findall(r' (?:d|viewBox|x|y|width)="([^"]*)"', content)))


def test_the_head_says_how_it_ended(tmp_path):
    content = html(write_run(tmp_path, state="failed", exit_code=5, error="the loss is not finite"))
    words = " ".join(text_of(content).split())
    assert "failed, exit code 5" in words
    assert "the loss is not finite" in words
    assert "20 of 20" in words


def test_a_run_that_ended_before_its_first_step(tmp_path):
    ends = [event("skip", 2, step=1), event("end", 3, step=0, state="failed", exit_code=2, error="no such file")]
    content = html(
        write_run(tmp_path, lines=[], events=[event("start", 1), *ends], step=0, state="failed", exit_code=2)
    )
    assert "no such file" in text_of(content)
    assert "Loss" not in text_of(content)


def test_a_damaged_record_is_not_called_missing(tmp_path):
    folder = write_run(tmp_path)
    (folder / "run.json").write_text('{"schema": 1, "sta')
    assert "run.json cannot be read" in text_of(html(folder))
    (folder / "run.json").unlink()
    assert "no run.json" in text_of(html(folder))


@pytest.mark.parametrize(("updated", "words"), [("2020-01-01T00:00:00+00:00", "silent for"), (None, "running")])
def test_a_run_that_is_silent_is_not_called_running(tmp_path, updated, words):
    content = html(write_run(tmp_path, state="running", exit_code=None, updated=updated))
    assert words in text_of(content)


def test_a_straggler_is_named_with_its_host(tmp_path):
    words = text_of(html(write_run(tmp_path, ranks=[rank_line(step, slow={2}) for step in range(1, 31)])))
    assert "rank 2 on node-b computes 250 ms a step, 5.0 times as long as the median of ranks (50 ms)" in words
    assert "67 % of the step" in words
    assert words.count("times as long") == 1


@pytest.mark.parametrize("counts", [(3, 1, 1), (1, 3, 1), (2, 2, 1), (1, 1, 3)])
def test_lines_of_fewer_ranks_than_others(tmp_path, counts):
    lines = [rank_line(step, num_ranks=number) for step, number in enumerate(counts, start=1)]
    assert f"rank {max(counts) - 1} on" in text_of(html(write_run(tmp_path, ranks=lines)))


def test_columns_of_fewer_ranks_than_others(tmp_path):
    lines = [rank_line(step, num_ranks=2) | {"data_seconds": [0.01, 0.01, 0.9]} for step in range(1, 5)]
    assert "rank 2" in text_of(html(write_run(tmp_path, ranks=lines)))


def test_even_ranks_are_no_finding(tmp_path):
    content = html(write_run(tmp_path, ranks=[rank_line(step) for step in range(1, 31)], events=SAVES[:1]))
    assert 'class="findings"' not in content


def test_a_rank_that_was_slow_for_a_time_is_named(tmp_path):
    ranks = [rank_line(step, slow={1} if 10 <= step < 13 else ()) for step in range(1, 91)]
    assert "rank 1 on node-a was slow between step 10 and 12" in text_of(html(write_run(tmp_path, ranks=ranks)))


def test_waiting_for_data_is_a_finding(tmp_path):
    words = text_of(html(write_run(tmp_path, ranks=[rank_line(step, data=0.15) for step in range(1, 31)])))
    assert "Ranks wait for their data for 50 % of the step" in words


def test_on_a_gpu_the_loader_and_the_memory_are_known(tmp_path):
    unknown = {"compute_seconds": [None] * 4, "wait_seconds": [None] * 4}
    slow = {"data_seconds": [0.01, 0.01, 0.01, 0.2]}
    run = write_run(tmp_path, ranks=[rank_line(step) | unknown | slow for step in range(1, 31)])
    content = html(run)
    words = text_of(content)
    assert "rank 3 on node-b waits for its data 200 ms a step, 20.0 times as long as the median of ranks" in words
    assert "the wait for other ranks is not told apart from computing" in words
    assert 'data-label="compute, or wait for others"' in content
    assert "Busy time" not in content
    assert words.count("381 MiB") == 4


def test_events_are_marks_and_words(tmp_path):
    events = [
        event("start", 1, host="node-a", layout={"shard": 4, "sharding": "none"}),
        event("resume", 2, step=5, checkpoint="step-00000005", changes=["optimizer.lr: 1 -> 2"]),
        event("replica", 2, step=5, found="rank 3 has lost it"),
        event("skip", 3, step=10),
        event("rollback", 4, step=12, to_step=8),
        event("alert", 5, step=15, kind="slow rank", text="rank 3 is slow"),
        event("budget", 6, step=19, which="max_hours", used=1.0, limit=1.0),
        event("end", 7, step=20, state="failed", exit_code=6, error="gone"),
    ]
    content = html(write_run(tmp_path, events=events))
    words = " ".join(text_of(content).split())
    for said in (
        "went on from step-00000005; changed: optimizer.lr: 1 -&gt; 2",
        "passed over a replica in memory, at step 5: rank 3 has lost it",
        "step 10 was skipped",
        "went back from step 12 to 8",
        "slow rank: rank 3 is slow",
        "the budget max_hours is used up",
        "ended: failed, exit code 6, at step 20: gone",
    ):
        assert said in words
    letters = re.findall(r'<g class="mark[^>]*data-from="(mark-0-\d)".*?>(\w|\$)</text></g>', content)
    assert "".join(letter for _, letter in letters[:6]) == "RSBA$E"
    assert all(f'id="{name}"' in content for name, _ in letters)


def test_the_marks_of_a_run_without_steps_are_one(tmp_path):
    events = [event("end", second, step=0, start=second, state="failed", exit_code=3) for second in range(1, 31)]
    run = read(write_run(tmp_path, lines=[], events=events))
    assert [(mark.step, mark.letters) for mark in find_marks(run, 20)] == [(0.0, "E")]


def test_bars_of_starts_have_their_numbers_and_ends(tmp_path):
    """Also of a start whose record is older than its last save: its end has the time of the record."""
    events = [event("start", 1), event("save", 9, step=5), event("end", 8, state="lost", step=5)]
    events += [event("start", second, start=start) for start, second in enumerate(range(10, 55), 2)]
    content = html(write_run(tmp_path / "few", events=events[:4]))
    assert "start 1: 2026-11-24 18:50:01, 8.0 s; ended: lost, at step 5" in content
    content = html(write_run(tmp_path / "many", events=events))
    assert "48 events of 46 starts" in content
    assert re.findall(r'data-text="start (\d+):', content) == [f"{start}" for start in range(7, 47)]


def test_a_mark_of_an_event_is_masked_before_it_is_cut(tmp_path):
    text = f"{'x ' * 135}hf_{'AbCdEfGhIj' * 3}"
    assert "hf_Ab" not in html(write_run(tmp_path, events=[event("alert", 5, step=15, kind="spike", text=text)]))


def test_runs_are_laid_over_each_other_with_what_differs_on_top(tmp_path):
    for name, rate in (("a", "0.1"), ("b", "0.2"), ("c", "0.1")):
        write_run(tmp_path / name)
        text = f"run: {{name: {name}, dir: runs/{name}}}\noptimizer: {{lr: {rate}, betas: [0.9, 0.95]}}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    content = html(*(tmp_path / name for name in "abc"))
    table = text_of(content[content.index("What differs") : content.index('id="losses"')]).split()
    assert table[2:9] == ["a", "b", "c", "optimizer.lr", "0.1", "0.2", "0.1"]
    assert "betas" not in table
    first = re.search(r"Training loss.*?</figure>", content, re.DOTALL)[0]
    assert re.findall(r'class="line (c\d)" data-label="(\w)"', first) == [("c0", "a"), ("c1", "b"), ("c2", "c")]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_key_that_is_newer_than_a_config_has_its_default_there(tmp_path, order):
    configs = {
        "a": "optimizer: {lr: 0.1}\nmodel: {config: {}}\n",
        "b": "optimizer: {lr: 0.1}\nmodel: {config: {rope_scaling: {factor: 2}}}\ntrain: {compile: auto}\n",
    }
    for name, text in configs.items():
        write_run(tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(text)
    rows = re.findall(r"<tr><th>([a-z._]+)</th>", compare.differences([read(tmp_path / name) for name in order]))
    assert rows == ["model.config.rope_scaling.factor"]


def test_a_page_of_one_run_says_where_the_charts_are_that_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("hfdist.tools.report.page._MOST_BYTES", 10_000)
    content = html(write_run(tmp_path, lines=[rewarded_line(step) for step in (1, 2, 3)], task="grpo"))
    assert re.search(r"metrics.jsonl has the figures of \d more chart", content)
    assert "fewer runs" not in content


def test_names_in_place_of_numbers_can_always_be_read_by_the_script():
    drawn = draw(Chart(title="x", curves=[Curve("c", [(0.0, 1.0)])], names=["\N{GRINNING FACE}" * 300] * 300))
    names = json.loads(unescape(re.search(r'data-names="([^"]*)"', drawn)[1]))
    assert (len(names), {*names}) == (8, {"\N{GRINNING FACE}" * 40})


def chart(content, title):
    """The labels of the curves of a chart; None: there is none of that title."""
    found = re.search(rf"<h3>{title} ?<.*?</figure>", content, re.DOTALL)
    return None if found is None else re.findall(r'data-label="([^"]*)"', found[0])


def test_of_preferences_held_out_figures_stand_beside_training(tmp_path):
    figures = {"rewards/margins": 0.2, "rewards/accuracies": 0.75, "rewards/chosen": 0.3, "rewards/rejected": 0.1}
    held_out = {"step": 20, "eval_loss": 0.5} | {f"eval_{key}": value for key, value in figures.items()}
    lines = [training_line(step) | figures for step in range(1, 21)]
    content = html(write_run(tmp_path, lines=[*lines, held_out], task="dpo"))
    for title in ("Accuracy", "Reward margin", "Reward of chosen answers", "Reward of rejected answers", "Loss"):
        assert chart(content, title) == ["training", "held out"], title
    assert "held-out accuracy 75 %" in " ".join(text_of(content).split())
    assert "mean of pairs" in content
    assert "nats a token" not in content


def test_of_rewards_the_loss_is_no_measure(tmp_path):
    lines = [rewarded_line(step) for step in range(1, 21)]
    lines += [{"step": step, "eval_loss": -value, "eval_reward": value} for step, value in ((10, 0.8), (20, 0.5))]
    content = html(write_run(tmp_path, lines=lines, task="grpo"))
    assert chart(content, "Loss") is None
    assert chart(content, "Policy loss") == ["training"]
    assert chart(content, "Reward") == ["training", "held out"]
    assert chart(content, "Reward short") == ["training"]
    words = " ".join(text_of(content).split())
    assert "held-out reward 0.5" in words
    assert "held-out loss" not in words
    assert "The held-out reward was highest at step 10, 0.8, and has fallen since" in words


def test_a_run_by_next_tokens_has_no_figures_of_rewards(tmp_path):
    content = html(write_run(tmp_path))
    assert chart(content, "Loss") == ["training"]
    assert not re.search(r"reward|accuracy|Entropy|KL", content.partition("<script>")[0].partition("<body")[2])


def test_runs_of_several_tasks_are_laid_over_their_like(tmp_path):
    lines = [rewarded_line(step) for step in range(1, 21)]
    held_out = {"step": 20, "eval_loss": -0.5, "eval_reward": 0.5, "eval_completion_tokens": 30.0}
    for name in "bc":
        write_run(tmp_path / name, lines=[*lines, held_out], task="rloo")
    content = html(write_run(tmp_path / "a"), tmp_path / "b", tmp_path / "c")
    assert chart(content, "Training loss") == ["a"]
    assert chart(content, "Held-out loss") is None
    assert chart(content, "Training reward") == chart(content, "Policy loss") == ["b", "c"]
    assert chart(content, "Length of answers") == ["b", "b, held out", "c", "c, held out"]


def test_the_newest_answers_have_their_rewards(tmp_path):
    answers = [
        {
            "step": step,
            "prompt": f"{step}+1=",
            "text": f"{number}" + "y" * 1000,
            "reward": 0.25,
            "rewards/right": number,
        }
        for step in range(1, 31)
        for number in range(2)
    ]
    content = html(write_run(tmp_path, rollouts=answers, task="grpo"))
    table = content[content.index("Answers and their rewards") :]
    rows = re.findall(r"<tr><td>(\d+)</td><td><pre>(.*?)</pre></td><td><pre>(.*?)</pre></td>(.*?)</tr>", table)
    assert [(step, prompt, text[0]) for step, prompt, text, _ in rows[:3]] == [
        ("30", "30+1=", "0"), ("30", "30+1=", "1"), ("29", "29+1=", "0")
    ]  # fmt: skip
    assert rows[1][3] == "<td>0.25</td><td>1</td>"
    assert len(rows) == 48
    assert all(len(text) < 320 and text.endswith(" ...") for _, _, text, _ in rows)


def test_answers_of_runs_to_the_same_prompts_stand_side_by_side(tmp_path):
    secret = "hf_" + "A1b2" * 9
    texts = {
        "a": {(1, "1+1="): ["it is 3", "4"], (2, "2+2="): ["it is <4>"], (3, "alone"): ["x"]},
        "b": {(1, "1+1="): ["it is 2", "4"], (2, "2+2="): [f"it is {secret}"], (2, "other"): ["y"]},
    }
    for name, own in texts.items():
        lines = [
            {"step": step, "prompt": prompt, "text": text, "reward": 0.5}
            for (step, prompt), answers in own.items()
            for text in answers
        ]
        write_run(tmp_path / name, rollouts=lines, task="grpo")
    content = html(tmp_path / "a", tmp_path / "b", write_run(tmp_path / "without"))
    begin = content.index("Answers to the same prompts")
    table = content[begin : content.index("</table>", begin)]
    rows = re.findall(r"<tr><td>(\d+)</td><td><pre>(.*?)</pre></td>(.*?)</tr>", table)
    assert [(step, prompt) for step, prompt, _ in rows] == [("2", "2+2="), ("1", "1+1=")]
    answers = [re.findall(r"<pre>(.*?)</pre><small>reward 0.5</small>", cells) for _, _, cells in rows]
    assert answers[1] == ["it is 3", "4", "it is <mark>2</mark>", "4"]
    assert answers[0][0] == "it is &lt;4&gt;"
    assert answers[0][1].startswith("it is <mark>")
    assert secret not in content
    # A page without two runs that have answered alike has none.
    content = html(tmp_path / "a", tmp_path / "without")
    assert "Answers to the same prompts" not in content
    # A page that is served puts them there once there are some.
    assert '<section id="answers">' in content


def test_same_configs_are_said_to_be_the_same(tmp_path):
    for name in "ab":
        write_run(tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(f"run: {{name: {name}}}\n")
    assert "The runs have the same config." in html(tmp_path / "a", tmp_path / "b")


def test_a_pipeline_has_its_schedule(tmp_path):
    spans = [(0, "forward", 0, 10), (1, "wait", 0, 10), (1, "forward", 10, 10), (1, "backward", 20, 20)]
    spans += [(0, "wait", 10, 30), (0, "backward", 40, 20)]
    lines = [
        {"ph": "X", "tid": rank, "cat": kind, "ts": 1e3 * start, "dur": 1e3 * length, "args": {"microbatch": 7}}
        for rank, kind, start, length in spans
    ]
    write_run(tmp_path)
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": lines}))
    content = html(tmp_path)
    assert "2 ranks, 60.0 ms, 50 % idle" in content
    assert "Busy: rank 0 50 %, rank 1 50 %." in content
    assert content.count("M0 0.08h10v0.84h-10z") == 1


def test_what_each_axis_sends_stands_beside_what_was_planned(tmp_path):
    write_run(tmp_path, ranks=[rank_line(step, slow={1}) for step in range(1, 9)])
    words = " ".join(text_of(parts([read(tmp_path)])["traffic"]).split())
    assert "Counted in step 4" in words
    assert "data 3.0 MiB 7 all-reduce 2.0 MiB, broadcast 1.0 MiB" in words
    (tmp_path / "plan.json").write_text(json.dumps(PLANNED))
    words = " ".join(text_of(parts([read(tmp_path)])["traffic"]).split())
    assert "data 3.0 MiB 2.0 MiB 7 all-reduce 2.0 MiB, broadcast 1.0 MiB 25 %" in words
    assert re.search(r"waits for others in \d+ % of a step; planned: 25 %", words)


def test_energy_says_where_it_comes_from(tmp_path):
    more = {
        "energy_kwh": 2.0,
        "earlier_energy_kwh": 1.0,
        "energy_source": "estimate",
        "cost": 4.0,
        "earlier_cost": None,
    }
    run = read(write_run(tmp_path))
    for name, value in more.items():
        setattr(run.record, name, value)
    words = " ".join(text_of(parts([run])["heads"]).split())
    assert "energy 3 kWh an estimate" in words
    assert "cost 4" in words


def test_the_curve_of_energy_has_the_unit_of_the_head(tmp_path):
    many, few = (
        read(write_run(tmp_path / str(last), lines=map(training_line, range(1, last + 1)))) for last in (300, 30)
    )
    assert "kWh, all starts" in curves.small_charts([many])
    drawn = curves.small_charts([few])
    assert "<small>Wh, all starts" in drawn
    assert "kWh, all starts" not in drawn


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (5, 5), (-3, 7), (1e-9, 2e-9), (0, 1e60), (6.7931, 6.7932), (-2, -1), (4e-4, 4e-4 + 5e-20)],
)
def test_an_axis_has_its_values_between_round_numbers(low, high):
    axis = linear(low, high)
    assert axis.low <= low <= high <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize("difference", [0.0, 1e-8, 1e-3])
def test_equal_runs_lie_on_one_line_of_a_readable_chart(tmp_path, difference):
    for number, name in enumerate(("a", "b")):
        lines = [training_line(step, loss=6.79 + number * difference) for step in (1, 2, 3)]
        write_run(tmp_path / name, lines=lines)
    runs = [read(tmp_path / name) for name in ("a", "b")]
    (_, low, _, height) = map(float, re.search(r'viewBox="([^"]+)"', curves.loss_charts(runs))[1].split())
    assert 0.01 * 6.79 <= height <= 0.1 * 6.79
    assert low < -6.79 < low + height


def test_marks_of_several_runs_have_their_colours(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, events=[event("rollback", 1, step=5, to_step=3)])
    runs = [read(tmp_path / name) for name in ("a", "b")]
    drawn = curves.small_charts(runs)
    assert 'class="mark c0' in drawn
    assert 'class="mark c1' in drawn
    assert 'class="mark alone' in curves.small_charts(runs[:1])


def test_a_logarithmic_axis_has_powers_of_ten():
    axis = logarithmic(0.02, 3e7)
    assert (axis.low, axis.high) == (-2, 8)
    assert [label for _, label in axis.ticks][:2] == ["0.01", "1"]
