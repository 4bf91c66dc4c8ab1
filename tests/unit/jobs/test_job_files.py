"""Job files: no value leaves its quotes, scripts do what the run's record says, manifests are as their schemas say."""

import ast
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

from hfdist.errors import ConfigError
from hfdist.records import read_run
from hfdist.tools.jobs import on_ray
from hfdist.tools.jobs.command import parse_job
from hfdist.tools.jobs.job import AGAIN
from hfdist.tools.jobs.slurm import write_slurm
from hfdist.tools.jobs.slurm_array import write_slurm_array
from tests.marks import many
from tests.unit.jobs.jobs import HOSTILE, NEEDED, RUN, job_of, leave, make, run_script, shell_of

SHELLCHECK = Path(sysconfig.get_path("scripts"), "shellcheck")
TWO = ("cluster.nodes=2",)
MODELS = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}


@pytest.mark.parametrize("target", NEEDED)
def test_no_value_leaves_its_quotes(tmp_path, monkeypatch, target):
    place = tmp_path / "a'b $(touch PWNED)"
    place.mkdir()
    monkeypatch.chdir(place)
    given = [*TWO, f"cluster.folder={json.dumps(str(place))}", *HOSTILE]
    given += ["cluster.setup=['echo \"$OF_THE_SITE\"']", 'cluster.environment.NAME="$(touch PWNED)\'"']
    job, texts = make(target, *given, folder=tmp_path)
    assert job.config.run.dir == 'runs/it\'s "$(touch PWNED)" #'
    script = shell_of(target, texts)
    for number, text in enumerate([script, *texts.values()]):
        if text.startswith("#!") or number == 0:
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
            checked = subprocess.run(
                [SHELLCHECK, "--shell=bash", "--severity=warning", "-"],
                input=text, text=True, capture_output=True, check=False,
            )  # fmt: skip
            assert checked.returncode == 0, checked.stdout
    done, calls = run_script(script, place)
    assert done.returncode == 1, done.stderr
    for arguments, variables in calls:
        assert arguments[arguments.index("-m") :] == ["-m", "hfdist", "pretrain", *RUN, *HOSTILE]
        assert variables["NAME"] == "$(touch PWNED)'"
        assert variables["PWD"] == str(place)
        assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert len(calls) == (2 if target in ("slurm", "parallelcluster") else 1)
    assert not list(tmp_path.rglob("PWNED"))
    assert "PWNED" not in {path.name for path in tmp_path.rglob("*")}
    # The comment with the command stays a comment.
    head = next(iter(texts.values())).partition("hfdist pretrain")[0]
    assert not re.search(r"^(#SBATCH --partition=other|touch)", head, flags=re.MULTILINE)


def test_lines_of_a_set_up_stay_as_they_are_in_a_container(tmp_path):
    given = ("cluster.image=image", "cluster.setup=['cat <<END', x, END]")
    _, texts = make("slurm", *TWO, *given, folder=tmp_path)
    assert "cat <<END\nx\nEND\n" in shell_of("slurm", texts)


def test_a_script_that_is_told_to_stop_before_it_has_begun_does_not_begin(tmp_path):
    machine = on_ray._Machine()
    machine.stop()
    assert machine.run(f"touch {tmp_path}/begun", {}) == AGAIN
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [([6], 6, 1), ([None, 75, None, 0], 0, 4), ([None, None, None], 6, 3), ([75, 75, 3], 3, 3)],
)
def test_ray_starts_again_what_was_lost_whole_or_asks_for_it(monkeypatch, ends, code, starts):
    """A script that ends with 6 has judged that nothing is gained by another start."""
    left = iter(ends)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda: None))
    monkeypatch.setattr(on_ray, "_run_once", lambda *_: next(left))
    with pytest.raises(SystemExit) as ended:
        on_ray.run_on_machines(nodes=2, cpus=1, gpus=0, memory_gib=None, max_restarts=2, script="")
    assert (ended.value.code, len(ends) - len([*left])) == (code, starts)


def test_the_machines_of_a_slurm_job_meet_at_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, texts = make("slurm", *TWO, "cluster.processes=2", "cluster.grace_seconds=120", folder=tmp_path)
    script = shell_of("slurm", texts)
    done, calls = run_script(script, tmp_path)
    assert "exit code 1, end (srun: 1)" in done.stdout
    for rank, (arguments, variables) in enumerate(calls):
        given = dict(word.removeprefix("--").split("=", 1) for word in arguments if "=" in word)
        assert given["rdzv-endpoint"] == "127.0.0.1:24711"
        assert (given["nnodes"], given["nproc-per-node"], given["max-restarts"]) == ("2", "2", "0")
        assert f"is_host={1 - rank}," in given["rdzv-conf"]
        assert given["local-addr"].startswith("127.0.0.")
        assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "90"
    assert "#SBATCH --signal=TERM@120\n" in script


@pytest.mark.parametrize(
    ("code", "state", "is_requeued", "more"),
    [
        (75, "RUNNING", True, ()),
        (75, "RUNNING", True, ("cluster.image=image",)),
        (6, "RUNNING", True, ()),
        (75, "COMPLETING", False, ()),
        *((code, "RUNNING", False, ()) for code in (0, 2)),
        # The script has the list of those that are tried again.
        *(many(code, "RUNNING", False, ()) for code in (3, 4, 5, 7, 8)),
    ],
)
def test_a_slurm_job_is_requeued_by_the_record(tmp_path, monkeypatch, code, state, is_requeued, more):
    monkeypatch.chdir(tmp_path)
    _, texts = make("slurm", *TWO, *more, folder=tmp_path)
    assert notes_of_second_start(tmp_path, shell_of("slurm", texts), code, state) == (
        "requeue 4711\n" if is_requeued else ""
    )


def notes_of_second_start(folder, script, code, state):
    """Run the script to the end of the run's second start, and give what it has asked of SLURM."""
    run_dir = folder / "runs" / "Job_1"
    leave(run_dir, (75, 5), (code, 10))
    # Before the start there is the record of the first.
    (run_dir / "run.json").rename(folder / "ENDED")
    text = (folder / "ENDED").read_text()
    (run_dir / "run.json").write_text(text.replace('"start": 2', '"start": 1'))
    done, _ = run_script(script, folder, state=state, RUN_DIR=str(run_dir))
    assert read_run(run_dir).start == 2
    assert done.returncode == code, done.stderr
    noted = folder / "notes.scontrol"
    return noted.read_text() if noted.exists() else ""


def test_a_job_that_another_program_starts_again_is_not_requeued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job, _ = make("slurm", *TWO, folder=tmp_path)
    (script,) = write_slurm(job, requeues=False).files
    assert notes_of_second_start(tmp_path, script.text, 75, "RUNNING") == ""
    assert "--requeue" not in script.text


def test_each_target_starts_again_by_the_exit_code_that_it_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "Job_1"
    for target, ended in {"kubernetes": 6, "skypilot": 75, "ray": 75}.items():
        leave(run_dir, (6, 10))
        (run_dir / "run.json").rename(tmp_path / "ENDED")
        folder = (f"cluster.folder={tmp_path}",)
        _, texts = make(target, *TWO, *folder, folder=tmp_path)
        done, _ = run_script(shell_of(target, texts), tmp_path, RUN_DIR=str(run_dir))
        assert done.returncode == ended, (target, done.stderr)
        (run_dir / "run.json").unlink()


def strictly(model, document):
    """Refuse fields that the model does not know: it would leave them out."""
    return model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("kind", ["kubernetes", "trainjob"])
def test_manifests_of_kubernetes_are_as_their_schemas_say(tmp_path, kind):
    given = [*TWO, "cluster.gpus=true", "cluster.cpus=4", "cluster.memory_gib=8", "cluster.kubernetes.queue=team"]
    given += ["cluster.kubernetes.namespace=research", "cluster.kubernetes.node_selector.zone=a"]
    _, texts = make(kind, *given, folder=tmp_path)
    documents = list(yaml.safe_load_all(*texts.values()))
    assert [document["kind"] for document in documents] == (
        ["JobSet"] if kind == "kubernetes" else ["TrainingRuntime", "TrainJob"]
    )
    for document in documents:
        model = MODELS[document["kind"]]
        assert strictly(model, document)
        assert not strictly(model, {**document, "spec": {**document["spec"], "replicatedJob": []}})
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job_of(documents[0])}
    kubernetes_validate.validate(job, "1.33", strict=True)
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 300
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(job, "1.33", strict=True)


@pytest.mark.parametrize("kind", ["kubernetes", "trainjob", "skypilot", "parallelcluster"])
def test_a_run_starts_on_the_disk_that_its_machines_share(tmp_path, kind):
    """This machine's folder is not there."""
    _, texts = make(kind, *TWO, folder=tmp_path)
    assert "\ncd /shared || exit 1\n" in shell_of(kind, texts)


def test_what_follows_an_exit_code_on_kubernetes(tmp_path):
    _, texts = make("kubernetes", *TWO, folder=tmp_path)
    (document,) = yaml.safe_load_all(*texts.values())
    again, stays, taken = job_of(document)["podFailurePolicy"]["rules"]
    assert (again["onExitCodes"]["values"], stays["onExitCodes"]["values"]) == ([75], [2, 3, 4, 5, 7, 8])
    assert taken["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    first, second = document["spec"]["failurePolicy"]["rules"]
    # The message of Kubernetes' job controller.
    message = "Container node for pod x/job-node-0-0-abc failed with exit code {} matching FailJob rule at index {}"

    def is_met(rule, text):
        return any(re.search(pattern, text) for pattern in rule.get("onJobFailureMessagePatterns", [""]))

    assert first["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert is_met(first, message.format(75, 0))
    assert is_met(first, "Pod x/job has condition DisruptionTarget matching FailJob rule at index 2")
    assert not is_met(first, message.format(5, 1))
    assert (second["action"], is_met(second, message.format(5, 1))) == ("FailJobSet", True)


def test_a_ray_program_holds_literals_only(tmp_path):
    _, texts = make("ray", *TWO, *HOSTILE, folder=tmp_path)
    imported, assigned, guard = ast.parse(*texts.values()).body
    assert imported.module == "hfdist.tools.jobs.on_ray"
    assert ast.literal_eval(assigned.value)["nodes"] == 2
    assert ast.unparse(guard.body) == "run_on_machines(**JOB)"


@pytest.mark.parametrize("given", ["cluster.gpus=false", "cluster.skypilot.accelerator=null"])
def test_skypilot_must_know_the_kind_of_gpus(tmp_path, given):
    with pytest.raises(ConfigError) as caught:
        make("skypilot", *TWO, given, folder=tmp_path)
    assert caught.value.where == "cluster.skypilot.accelerator"
    for hint in caught.value.hint.split(", or "):
        make("skypilot", *TWO, given, hint, folder=tmp_path)


def test_new_machines_must_get_hfdist(tmp_path):
    none = (*TWO, "cluster.skypilot.install=[]")
    with pytest.raises(ConfigError, match="no hfdist") as caught:
        make("skypilot", *none, folder=tmp_path)
    assert caught.value.where == "cluster.skypilot.install"
    make("skypilot", *none, "cluster.image=image:1", folder=tmp_path)


class TestArray:
    """Machines that share the files of a corpus."""

    def run(self, script, place, number):
        programs = place / "programs"
        programs.mkdir(exist_ok=True)
        for name, text in {
            "python": '#!/bin/bash\nprintf "%s\\0" "$PWD" "$NAME" "$@" >"$CALLED"\n',
            "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        called = place / f"called-{number}"
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(number), "CALLED": str(called)}
        subprocess.run(["bash", "-c", script], env=environment, cwd=place, check=True)
        return called.read_text().split("\0")[:-1]

    @pytest.mark.parametrize("image", [(), ("cluster.image=image:1", "cluster.slurm.mounts=['/a:/b']")])
    @pytest.mark.parametrize("recipe", ["pretokenize", "index"])
    def test_each_task_has_a_share_of_its_own_and_no_value_leaves_its_quotes(self, tmp_path, recipe, image):
        place = tmp_path / "a'b $(touch PWNED)"
        place.mkdir()
        hostile = [*HOSTILE, "data.workers=8"]
        given = [
            "slurm",
            f"recipe={recipe}",
            "cluster.nodes=3",
            "cluster.hours=2",
            "cluster.cpus=8",
            "cluster.slurm.partition=cpu",
            *image,
        ]
        given += [f"cluster.folder={json.dumps(str(place))}", 'cluster.environment.NAME="$(touch PWNED)\'"']
        _, job = parse_job([*given, "run.name=web", f"out={tmp_path / 'web.sbatch'}", *hostile])
        (script,) = write_slurm_array(job).files
        for line in ("--array=0-2", "--time=0-02:00:00", "--partition=cpu", "--nodes=1", "--requeue"):
            assert f"\n#SBATCH {line}\n" in script.text
        # srun does not take it over from the job.
        assert ("\nexec srun --cpus-per-task=8 " in script.text) == bool(image)
        checked = subprocess.run(
            [SHELLCHECK, "--shell=bash", "--severity=warning", "-"],
            input=script.text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert checked.returncode == 0, checked.stdout
        for number in range(3):
            folder, name, *called = self.run(script.text, place, number)
            assert (folder, name) == (str(place), "$(touch PWNED)'")
            expected = ["-P", "-m", "hfdist", recipe, "run.name=web", *hostile, f"data.shard={number}/3"]
            assert called == expected
        assert not list(tmp_path.rglob("PWNED"))

    @pytest.mark.parametrize(
        ("given", "hint"),
        [
            (["ray", "recipe=pretokenize"], "to=slurm"),
            (["slurm", "index", "data.shard=1/2"], "data.shard=0/1 cluster.nodes=4"),
        ],
    )
    def test_what_it_is_not_for(self, given, hint):
        with pytest.raises(ConfigError) as caught:
            parse_job(given)
        assert caught.value.hint == hint
