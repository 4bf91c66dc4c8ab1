"""GRPO on answers of servers: their log-probabilities are the policy's, and their weights those of the step."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.errors import PeerError
from hfdist.records import RunFolder, read_lines
from hfdist.testing import RankFailed, run_ranks
from recipes.tune import main
from tests.distributed import policy_runs
from tests.distributed.policy_runs import each_once, trained_prompts
from tests.distributed.preference_runs import GLOBAL_BATCH, STEPS, make_config, tune
from tests.distributed.remote_generators import free_port
from tests.inference_servers import STUBS
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

EVEN_SHARE = """
def even_share(generations):
    return [sum(letter in "02468" for letter in one.text) / max(1, len(one.text.split())) for one in generations]
"""
"""A reward: the share of even digits."""


@pytest.fixture
def serve(policy, tmp_path):
    """Starts a stub in a process of its own, and gives the process and the address."""
    started = []

    def run(name, folder, port, mode):
        torch.set_num_threads(1)
        STUBS[name](folder, port=port, mode=mode).serve()

    def start(name, port=None, mode="raw_logprobs", sizes=None):
        port, folder = port or free_port(), policy
        if sizes is not None:
            folder = tmp_path / "other"
            AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(folder)
        process = multiprocessing.get_context("fork").Process(target=run, args=(name, folder, port, mode))
        process.start()
        started.append(process)
        # It listens once it has its model; a run asks once.
        while True:
            assert process.is_alive(), "the stub has ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                return process, port

    yield start
    for process in started:
        process.kill()
        process.join()


def lines_of(folder):
    return [line for line in read_lines(RunFolder(folder).metrics) if "loss" in line]


def overrides(name, port, *own):
    return (
        "task=grpo",
        *policy_runs.COMMON,
        f"task.server={name}",
        f"task.server_addresses=[http://127.0.0.1:{port}]",
        "train.eval_every=null",
        "report.log_every=1",
        *own,
    )


@pytest.mark.parametrize(
    ("name", "strategy", "temperature", "mode"),
    [
        ("vllm", "fsdp2", 1, "raw_logprobs"),
        ("sglang", "single", 1.3, "processed_logprobs"),
        many("sglang", "pipeline", 1.3, "processed_logprobs"),
        many("vllm", "zero3", 1.3, "processed_logprobs"),
    ],
)
def test_the_log_probabilities_are_those_of_the_policy_that_trains(
    tmp_path, policy, sums, cache_dir, serve, name, strategy, temperature, mode
):
    _, port = serve(name, mode=mode)
    own = ("task.max_staleness=0", f"task.temperature={temperature}", f"strategy={strategy}")
    num_ranks = 1 if strategy == "single" else 2
    folder = tune(tmp_path / "run", policy, sums, num_ranks, *overrides(name, port, *own))
    lines = lines_of(folder)
    assert len({line["loss"] for line in lines}) > 2
    assert max(line["mismatch"] for line in lines) < 1e-5
    assert [line["largest_ratio"] for line in lines] == pytest.approx([1.0] * STEPS, abs=1e-4)
    assert {line["staleness_max"] for line in lines} == {0}
    assert trained_prompts(folder) == each_once(STEPS)


@pytest.mark.parametrize("name", ["vllm", many("sglang")])
def test_a_server_that_is_killed_and_comes_back_reads_the_weights_of_the_step(
    tmp_path, policy, sums, cache_dir, serve, name
):
    steps, folder = 8, tmp_path / "run"
    process, port = serve(name)

    def kill_and_start():
        while len(trained_prompts(folder)) < 2 * GLOBAL_BATCH:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        serve(name, port)

    striker = threading.Thread(target=kill_and_start)
    striker.start()
    tune(folder, policy, sums, 1, *overrides(name, port, "task.max_staleness=0", f"train.max_steps={steps}"))
    striker.join()
    lines = lines_of(folder)
    # With the weights that the new server begins with it would be larger.
    assert max(line["mismatch"] for line in lines) < 1e-5
    assert trained_prompts(folder) == each_once(steps)


def test_a_server_of_another_model_ends_the_run_with_its_reason(tmp_path, policy, sums, cache_dir, serve):
    _, port = serve("vllm", sizes=policy_runs.SIZES | {"hidden_size": 16})
    with pytest.raises(RankFailed) as caught:
        tune(tmp_path / "run", policy, sums, 1, *overrides("vllm", port))
    error = caught.value.__cause__
    assert isinstance(error, PeerError)
    assert "all generators have ended" in error.what
    assert "; Peer lost: the server has refused; " in error.found
    assert "size mismatch of " in error.found
    assert trained_prompts(tmp_path / "run") == []


@pytest.mark.many
@pytest.mark.timeout(900)
def test_it_learns_from_the_answers_of_two_servers(tmp_path, policy, sums, cache_dir, serve, monkeypatch):
    install_package(tmp_path, monkeypatch, "digits", EVEN_SHARE, "hfdist.rewards", even_share="even_share")
    ports = [serve("vllm")[1] for _ in range(2)]
    addresses = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    own = ("task.rewards={even_share: 1.0}", "train.max_steps=24", "optimizer.lr=5e-3", "report.log_every=6")
    addressed = f"task.server_addresses=[{addresses}]"
    folder = tmp_path / "run"
    config = make_config(folder, policy, sums, *overrides("vllm", ports[0], addressed, *own))
    run_ranks(main.__wrapped__, 1, config, group=False, timeout_seconds=800)
    rewards = [line["reward"] for line in lines_of(folder)]
    assert rewards[-1] > rewards[0] + 0.2
    assert trained_prompts(folder) == each_once(24)
