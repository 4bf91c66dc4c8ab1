"""The wheel as users get it: conf and recipes are inside, and experiments compose far from the checkout."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.unit.config.shipped import OPTIONS, needed_overrides, primary_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

COMPOSE_ALL = """
import json, sys
import hfdist
from hfdist.config.composition.compose import compose_config
from hfdist.config.conf_folder import shipped_folder
for primary, overrides in json.load(sys.stdin):
    compose_config(overrides, name=primary)
print(json.dumps([hfdist.__file__, str(shipped_folder()), [name for name in sys.modules if name == "torch"]]))
"""


def call(*command, cwd, **options):
    """Run to the end, and show what went wrong."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a fresh environment with the wheel, and our dependencies but not our checkout."""
    folder = tmp_path_factory.mktemp("fresh")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(call(python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel, cwd=folder)
    # A path in a .pth file is searched, but .pth files in that path are not: an editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_conf_and_recipes_are_inside_and_tests_are_not(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        shipped = {p for p in (ROOT / folder).rglob("*") if p.suffix in (".yaml", ".py")}
        assert shipped
        assert {f"hfdist/{p.relative_to(ROOT)}" for p in shipped} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hfdist"}
    assert not [name for name in names if "test_" in name or name.endswith((".pth", ".pyc"))]


def test_every_experiment_composes_from_the_wheel(installed, tmp_path):
    # Of all groups: unit/config composes the others from the same files, which the test above finds inside.
    overrides = [
        (primary_for(group, option), [f"{group}={option}", *needed_overrides(group, option)])
        for group, option in OPTIONS
        if group == "experiment"
    ]
    answer = call(installed, "-I", "-c", COMPOSE_ALL, cwd=tmp_path, input=json.dumps(overrides))
    package, conf, torch = json.loads(answer)
    assert package.startswith(str(installed.parents[1]))
    assert Path(conf) == Path(package).parent / "conf"
    assert torch == []


def test_the_recipe_runs_as_a_module_from_any_folder(installed, tmp_path):
    out = call(installed, "-I", "-m", "hfdist.recipes.pretrain", "--cfg", "job", "+experiment=demo", cwd=tmp_path)
    assert "name: demo" in out
    assert "strategy: 3d, ddp, fsdp2" in call(installed, "-I", "-m", "hfdist.recipes.pretrain", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
