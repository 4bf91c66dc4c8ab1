"""The pages: up-to-date keys, links that lead somewhere, and commands that exist, compose and fit their processes."""

import re
import shlex

import pytest
import yaml

from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.run import AUTO
from hfdist.planning.command import parse_request
from hfdist.tools.jobs.command import parse_job
from proofs.follow_readme import ELSEWHERE
from proofs.pages.keys import PAGES as GENERATED
from tests.unit.config.shipped import CONF, EXPERIMENTS, plan_of

ROOT = CONF.parent
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "AGENTS.md", "ARCHITECTURE.md", "CHANGELOG.md")]
PAGES = [*TOP, ROOT / "benchmarks" / "RESULTS.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def name(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    """The names that GitHub and mkdocs give to the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        yield re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pytest.mark.parametrize("file", GENERATED)
def test_what_is_made_from_the_code_is_up_to_date(file):
    assert (DOCS / file).read_text(encoding="utf-8") == GENERATED[file](), "make docs writes it"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for file, anchor in LINK.findall(text):
        target = (path.parent / file) if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


OF_USERS = r"```\n(hfdist|accelerate launch|pip install|python \w+\.py)\b"
OF_THE_HOUSE = r"```\n(make|python -m benchmarks)\b"


# Decisions are for those who change hfdist.
@pytest.mark.parametrize(
    "path", [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"], ids=name
)
def test_a_page_begins_with_a_command_of_users_or_with_what_it_shows(path):
    text = path.read_text(encoding="utf-8").partition("\n")[2].lstrip()
    assert re.match(rf"{OF_USERS}|\w|\[|`\w", text)
    assert re.search(f"{OF_USERS}|{OF_THE_HOUSE}", text)


def test_each_page_is_found_from_another():
    found = {
        (path.parent / file).resolve()
        for path in PAGES
        for file, _ in LINK.findall(path.read_text(encoding="utf-8"))
        if file
    }
    assert {*DOCS.rglob("*.md")} <= found


def test_the_list_for_machines_has_each_page():
    """Decisions have one line."""
    listed = [ROOT / file for file, _ in LINK.findall((ROOT / "llms.txt").read_text(encoding="utf-8"))]
    assert {path for path in DOCS.rglob("*.md") if path.parent.name != "decisions"} <= {*listed}
    assert all(path.exists() for path in listed)
    assert len(listed) == len({*listed})


def test_each_page_is_in_the_menu_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    items = [
        item for entry in nav for value in entry.values() for item in (value if isinstance(value, list) else [entry])
    ]
    assert sorted(ROOT / path for item in items for path in item.values()) == sorted(PAGES)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_make_commands_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE)} <= targets


TEXTS = [
    *TOP,
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted(CONF.rglob("*.yaml")),
]
# A line goes on after a backslash, and in the comments of conf/ on a line that stands further in.
COMMAND = re.compile(
    r"(?:accelerate launch [^\n]*--config_file (?P<launch>conf/launch/\w+\.yaml) recipes/(?P<recipe>\w+)\.py"
    r"|(?<![\w/])(?<!\$ )hfdist (?P<command>pretrain|finetune|tune|prove|pretokenize))"
    r"(?P<arguments>(?: (?:[^\n`]*\\\n)*[^\n`]*(?:\n#   [^\n]*)*)?)"
)
GPUS = 8


def commands(path):
    """Launch file (None: `hfdist`), recipe and overrides of each, but of those that leave it to the reader."""
    for found in COMMAND.finditer(path.read_text(encoding="utf-8")):
        words = shlex.split(re.sub(r"\\\n|\n#", " ", found["arguments"]), comments=True)
        # Without words it is only named.
        if words and not any(word.startswith(("...", "--help", "--cfg")) for word in words):
            yield found["launch"], found["recipe"] or found["command"], words


COMMANDS = [
    pytest.param(*command, id=f"{path.relative_to(ROOT)}: {command[1]} {' '.join(command[2])}")
    for path in TEXTS
    for command in commands(path)
]


def test_there_are_commands():
    assert len(COMMANDS) >= 20
    pages = {path.name for path in TEXTS if path.suffix == ".md" and any(commands(path))}
    assert pages >= {
        "README.md", "getting-started.md", "layouts.md", "data.md", "fine-tuning.md", "pipelines.md", "checkpoints.md",
        "faults.md", "machines.md", "optimizers.md",
    }  # fmt: skip


@pytest.mark.parametrize(("launch", "recipe", "words"), COMMANDS)
def test_a_command_fits_its_processes(launch, recipe, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["data=chats.jsonl" if word == "data=..." else word for word in words]
    words = [word for word in words if not word.startswith("checkpoint.resume=")]  # of a run that comes before
    config = compose_config(words, name=recipe if recipe in ("finetune", "tune") else "pretrain")
    if launch is not None:
        num_processes = yaml.safe_load((ROOT / launch).read_text())["num_processes"]
    else:
        num_processes = GPUS if config.launch.processes == AUTO else int(config.launch.processes)
    topology, batch = plan_run(config, world_size=num_processes)
    assert topology.world_size == num_processes
    assert batch.global_batch_size % topology.data == 0


ABOUT_RUN = re.compile(r"(?<![\w/])(?<!\$ )hfdist (plan|job) ((?:[^\n`]*\\\n)*[^\n`]*(?:\n#   [^\n]*)*)")


def about_runs():
    """Commands about runs that they do not start, but those that leave something to the reader."""
    for path in TEXTS:
        for command, line in ABOUT_RUN.findall(path.read_text(encoding="utf-8")):
            words = shlex.split(re.sub(r"\\\n|\n#", " ", line), comments=True)
            if "..." not in line and (command == "plan" or path.suffix == ".yaml") and "=" in line:
                yield pytest.param(command, words, id=f"{path.relative_to(ROOT)}: {command} {' '.join(words)}")


@pytest.mark.parametrize(("command", "words"), list(about_runs()))
def test_a_command_about_a_run_fits_its_processes(command, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.parquet").touch()
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.yaml").write_text(to_yaml(compose_config(["run.name=demo"])))
    words = [word.replace("/data/text/*.parquet", "texts.parquet") for word in words]
    if command == "plan":
        assert parse_request(words).processes or "plan.find=processes" in words
    else:
        assert parse_job(words)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_each_experiment_says_its_plan(experiment):
    assert f"+experiment={experiment}" in plan_of(experiment)
    shown = f"`hfdist plan {shlex.join(plan_of(experiment))}`"
    assert shown in (DOCS / "experiments.md").read_text(encoding="utf-8"), "make plan writes it"


@pytest.mark.parametrize("path", [path for path in TEXTS if path.suffix == ".md"], ids=lambda path: path.name)
def test_no_two_commands_of_a_page_share_a_run(path):
    """The second would go on where the first has stopped, with another config."""
    runs = [
        next((word for word in words if word.startswith(("run.name=", "+experiment="))), recipe)
        for _, recipe, words in commands(path)
        if recipe != "prove" and (path.parent == ROOT or not any(part in " ".join(words) for part in ELSEWHERE))
    ]
    assert len(runs) == len({*runs})
