"""The page of a report in a real browser: nothing overflows on a phone, values show, and it asks for nothing else."""

import json
import os
import subprocess
import sys

import pytest

from hfdist.tools.report.page import page, parts
from hfdist.tools.report.reading.run_files import RunFiles
from tests.debian import why_missing
from tests.e2e.browser import CHROMIUM, browsing
from tests.unit.config.shipped import CONF
from tests.unit.report.folders import event, rank_line, training_line, write_run

pytestmark = pytest.mark.e2e
LONG = "a-very-long-name-of-a-host-in-a-cluster.with-a-domain.example"
OVERFLOW = """[...document.querySelectorAll("body *")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.width && (box.right > innerWidth + 1 || box.left < -1) && !one.closest("svg, .scroll");
}).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser():
    if reason := why_missing(CHROMIUM.name):
        pytest.skip(reason)
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with every part of the page, and names that do not break into lines."""
    folder = tmp_path_factory.mktemp("runs") / f"run-{LONG}"
    events = [
        event("start", 1, host=LONG, layout={"shard": 4, "sharding": "none"}),
        event("save", 5, step=10, bytes=2e9, seconds=3, stall_seconds=0.2),
        event("resume", 9, step=10, checkpoint="step-00000010", changes=["data.sources.stdlib.path: null -> " + LONG]),
        event("alert", 12, step=15, kind="loss spike", text=f"the loss is 9.5 on {LONG}"),
        event("end", 19, step=20, state="failed", exit_code=5, error=f"gone: /{LONG}/{LONG}"),
    ]
    pools = {"data/all/share": 1.0, "data/all/tokens": 4e9, "data/all/epochs": 0.3, "data/all/filled": 1.0}
    write_run(
        folder,
        lines=[*(training_line(step) for step in range(1, 21)), {"step": 20, "eval_loss": 3.0}, {"step": 20} | pools],
        events=events,
        ranks=[rank_line(step, slow={2}) for step in range(1, 21)],
        samples=[{"step": 20, "prompt": "def ", "text": LONG * 5}],
        rollouts=[
            {"step": step, "prompt": f"{step}+1=", "text": f"it is {step + 1}", "reward": step / 20}
            for step in range(1, 21)
        ],
        hosts=[LONG] * 4,
        state="failed",
        exit_code=5,
        error=f"gone: /{LONG}/{LONG}",
    )
    spans = [
        (rank, kind, 20 * rank + 10 * place, 10)
        for rank in (0, 1)
        for place, kind in enumerate(("forward", "backward"))
    ]
    lines = [
        {"ph": "X", "tid": rank, "cat": kind, "ts": 1e3 * start, "dur": 1e3 * length, "args": {"microbatch": 3}}
        for rank, kind, start, length in spans
    ]
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": lines}))
    (folder / "config.yaml").write_text(f"run: {{name: x}}\nmodel: {{name: {LONG}}}\n")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    return write([folder], folder.parent / "one.html")


def write(folders, out):
    runs = [RunFiles(folder) for folder in folders]
    for run in runs:
        run.read()
    out.write_text(page(runs, parts(runs)))
    return f"file://{out}"


def point_at(browser, selector, across=0.5, down=0.5):
    """Move the mouse onto the first such element, scrolled into view, and give what the page shows of it."""
    place = f"""(() => {{
        const one = document.querySelector({json.dumps(selector)});
        one.scrollIntoView({{block: "center"}});
        const box = one.getBoundingClientRect();
        return [box.x + {across} * box.width, box.y + {down} * box.height];
    }})()"""
    # The page hides what it shows when it scrolls, which it tells in the next frame.
    browser.ask(place)
    browser.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
    browser.point(*browser.ask(place))
    browser.wait_for("!document.getElementById('tip').hidden")
    return browser.ask("document.getElementById('tip').innerText")


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows(browser, address, folder, width):
    several = write([folder, write_run(folder.parent / "other")], folder.parent / "two.html")
    for url in (address, several):
        browser.open(url, width=width)
        browser.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask(OVERFLOW) == []
        assert browser.ask("document.querySelectorAll('figure').length") >= 9
    assert browser.said == []


def test_dark_is_dark(browser, address):
    colours = []
    for is_dark in (False, True):
        browser.open(address, is_dark=is_dark)
        style = "getComputedStyle(document.body)"
        colours.append([browser.ask(f"{style}.{name}") for name in ("backgroundColor", "color")])
    assert colours == [["rgb(255, 255, 255)", "rgb(27, 31, 36)"], ["rgb(20, 23, 27)", "rgb(232, 234, 237)"]]


def test_values_show_where_one_points(browser, address):
    browser.open(address)
    assert point_at(browser, "#losses .plot", across=0.999).startswith("tokens 83.89 M\ntraining: 7.036\nheld out: 3")
    assert browser.ask("document.querySelectorAll('#losses .cross').length") == 1
    point_at(browser, "#curves .plot", across=0.6)
    # The same step in all charts.
    assert browser.ask("document.querySelectorAll('#curves .cross').length") > 4
    assert point_at(browser, "#losses .mark.bad text") == f"step 15: loss spike: the loss is 9.5 on {LONG}"
    assert "4.33 times the median" in point_at(browser, "#ranks .plot", down=0.5)
    assert point_at(browser, "#pipeline .plot", across=0.4, down=0.4).startswith(
        "full backward, micro batch 3\n10.0 ms"
    )
    assert browser.said == []


def test_keys_move_along_a_curve(browser, address):
    browser.open(address)
    browser.ask("document.querySelector('#losses .plot').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight")
    browser.wait_for("document.getElementById('tip').innerText.startsWith('tokens')")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape")
    browser.wait_for("document.getElementById('tip').hidden")


def test_answers_are_searched(browser, address):
    browser.open(address)
    shown = "[...document.querySelectorAll('#rollouts tbody tr:not([hidden])')].map((row) => row.cells[1].innerText)"

    def search(text):
        set_value = f"field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input', {{bubbles: true}}))"
        browser.ask(f"(() => {{ const field = document.querySelector('#rollouts .find'); {set_value}; }})()")
        return browser.ask(shown)

    assert search("Step>17 reward<0.96 IS") == ["19+1=", "18+1="]
    assert browser.ask("document.querySelector('#rollouts .found').textContent") == "2 of 20"
    # What is folded is found, too.
    assert search("2+1=") == ["12+1=", "2+1="]
    assert browser.ask("document.getElementById('rollouts-more').open")
    assert search("reward>2") == []
    assert len(search(" ")) == 20
    assert browser.said == []


def test_it_asks_nobody_for_anything(browser, address):
    browser.requested.clear()
    browser.open(address)
    assert [url for url in browser.requested if not url.startswith("data:")] == [address]
    # Its policy holds, whatever a text of a run has done.
    picture = '<img src="http://127.0.0.1:9/x.png" onerror="window.ran = 1">'
    browser.ask(f"document.body.insertAdjacentHTML('beforeend', '{picture}')")
    browser.wait_for("document.images[0].complete")
    assert browser.ask("window.ran") is None
    assert any("Content Security Policy" in text for text in browser.said)
    browser.said.clear()


def test_a_page_that_is_served_follows_the_run(browser, folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "hfdist", "report", str(folder), "--live"],
        env=os.environ | {"PYTHONPATH": str(CONF.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        browser.open(process.stdout.readline().strip())
        browser.wait_for("document.getElementById('live').textContent === 'live'")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(training_line(21, loss=1.25)) + "\n")
        browser.wait_for("document.getElementById('heads').textContent.includes('1.25')")
        assert browser.said == []
    finally:
        process.terminate()
        process.wait()
