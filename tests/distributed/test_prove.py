"""The proof of a layout: right layouts pass, and a mistake planted into one is seen."""

import multiprocessing
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hfdist.config.batch import IGNORED
from hfdist.config.composition.compose import compose_config
from hfdist.data import TokenStream
from hfdist.strategies.engine import Engine
from hfdist.strategies.pipelines.pipeline import PipelineEngine
from hfdist.testing import RankFailed, run_ranks
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.trainer import DistributedTrainerMixin
from hfdist.verify import parity
from recipes.prove import main
from tests.distributed.island_runs import served
from tests.e2e.forked import run_forked
from tests.marks import many

pytestmark = pytest.mark.distributed

SMALL = ("model=tiny", "data.sequence_length=32", "data.workers=0", "train.global_batch_size=8",
         "train.micro_batch_size=2", "optimizer.lr=3e-3", "optimizer.warmup_steps=20", "report=quiet")  # fmt: skip
TIED = "model.config.tie_word_embeddings=true"


def run_asked(pipe):
    """In a process forked before any mistake is planted: the run on one process, without seconds of imports."""
    command, folder = pipe.recv()
    _, flag, script, *arguments = command
    assert flag == "-P"
    done = run_forked(*arguments, cwd=Path(folder), script=Path(script))
    done.stdout += done.stderr
    pipe.send(done)


def on_rank(start, overrides, pipe, plant):
    """Run the recipe, with a mistake that the run on one process does not have."""

    original = parity.subprocess.run

    def ask(command, **named):
        if "--config-dir" not in command:  # DeepSpeed asks the system
            return original(command, **named)
        pipe.send((command, command[command.index("--config-dir") + 1]))
        return pipe.recv()

    parity.subprocess.run = ask
    if plant is not None:
        plant()
    return start([*SMALL, *overrides])


def with_config(overrides):
    main.__wrapped__(compose_config(overrides))


def as_command(overrides):
    sys.argv = ["prove.py", *overrides]
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def prove(folder, num_processes, *overrides, plant=None, start=with_config):
    pipe, other = multiprocessing.Pipe()
    single = multiprocessing.get_context("fork").Process(target=run_asked, args=(other,))
    single.start()
    try:
        overrides = [f"run.dir={folder}", *overrides]
        return run_ranks(on_rank, num_processes, start, overrides, pipe, plant, group=num_processes > 1)
    finally:
        single.kill()
        single.join()


@pytest.mark.parametrize(
    ("num_processes", "layout", "kernels"),
    [
        (2, ["strategy=zero2", "train.precision=bf16", "model.attention=varlen"], "attention varlen; loss chunked"),
        many(2, ["strategy=zero3", "train.precision=bf16", "model.attention=varlen"], "attention varlen; loss chunked"),
        many(2, ["strategy=tensor"], "transformers' plan for the type; the vocabulary is divided"),
        many(2, ["strategy=long_context", "strategy.offload=cpu"], "sequences shared by 2 ranks (ulysses)"),
        many(2, ["strategy=pipeline", "adapter=lora", "adapter.rank=4", "model.attention=varlen"], "attention varlen"),
    ],
)
def test_right_layouts_pass(tmp_path, cache_dir, capfd, num_processes, layout, kernels):
    prove(tmp_path, num_processes, *layout)
    said = capfd.readouterr().err
    assert said.count("CERTIFICATE: passed") == 1
    assert f"{num_processes} processes: " in said
    [computed] = [line for line in said.splitlines() if line.startswith("computed by: ")]
    assert kernels in computed
    assert not (tmp_path / "prove").exists()


@pytest.mark.parametrize(
    ("layout", "method"),
    [many("fsdp2", "streaming"), ("zero1", "parameter_server")],
)
def test_an_island_of_a_layout_passes(tmp_path, cache_dir, capfd, layout, method):
    with served() as address:
        prove(tmp_path, 2, f"strategy={layout}", f"islands={method}", "islands.count=2", f"islands.address={address}")
    said = capfd.readouterr()
    assert "one island, " in said.err
    assert said.err.count("CERTIFICATE: passed") == 1
    # Both runs in the layout have met the server.
    assert said.out.count("with 2 ranks") == 2


def drop_a_micro_batch():
    """The first of the two that a rank has in a step."""
    original, calls = Engine.forward_backward, []

    def forward_backward(self, batch, num_items, hooks):
        calls.append(1)
        return torch.zeros(()) if len(calls) % 2 == 1 else original(self, batch, num_items, hooks)

    Engine.forward_backward = forward_backward


def halve_the_gradients():
    """As where they are averaged but should be summed. Clipping hides it from all figures but the norm before it."""
    original = Engine.clip_grad_norm

    def clip_grad_norm(self, max_norm):
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.5)
        return original(self, max_norm)

    Engine.clip_grad_norm = clip_grad_norm


def lose_the_cursor():
    TokenStream.load_state_dict = lambda self, *state, **options: None


def decay_nothing():
    DistributedTrainerMixin.get_decay_parameter_names = lambda self, model: []


def skip_the_sum_of_tied_gradients():
    PipelineEngine._sum_shared = lambda self: None


def divide_by_own_targets():
    """So that a step has the mean of the ranks' means."""
    original = EngineTrainer._get_num_items_in_batch

    def own_number(self, batch_samples, device):
        assert original(self, batch_samples, device) is not None
        return 2 * sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batch_samples)

    EngineTrainer._get_num_items_in_batch = own_number


def lose_the_positions():
    """So that packed documents see each other."""
    original = PipelineEngine.forward_backward

    def forward_backward(self, batch, num_items, hooks):
        assert batch.pop("position_ids") is not None
        return original(self, batch, num_items, hooks)

    PipelineEngine.forward_backward = forward_backward


def lose_the_float32_weights():
    def step_in_bfloat16(optimizer, args, kwargs):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.copy_(parameter.bfloat16())

    register_optimizer_step_post_hook(step_in_bfloat16)


OF_THE_FIRST_STEP = "loss, gradient norm, gradients of step 1, weights at the end, held-out loss"


@pytest.mark.many  # one is always seen, below; what each figure shows is in tests/unit/test_parity.py
@pytest.mark.parametrize(
    ("layout", "plant", "seen"),
    [
        ("ddp", drop_a_micro_batch, OF_THE_FIRST_STEP),
        ("ddp", halve_the_gradients, "gradient norm"),
        ("ddp", divide_by_own_targets, OF_THE_FIRST_STEP),
        ("ddp train.precision=bf16", lose_the_float32_weights, "share of bfloat16 weights"),
        ("zero2", lose_the_cursor, "loss after resuming, weights after resuming"),
        ("pipeline", skip_the_sum_of_tied_gradients, "gradients of step 1"),
        ("pipeline", lose_the_positions, "loss, gradient norm, gradients of step 1"),
    ],
)
def test_planted_mistakes_fail(tmp_path, cache_dir, layout, plant, seen):
    overrides = f"strategy={layout} train.max_grad_norm=0.1 {TIED}".split()
    with pytest.raises(RankFailed) as failure:
        prove(tmp_path, 2, *overrides, plant=plant)
    assert "NumericsError: Numerics error: the layout does not train as one process does" in str(failure.value)
    where = re.search("where: *(.*)", str(failure.value))[1]
    assert seen in where if layout == "pipeline" else seen == where
    assert (tmp_path / "prove" / "layout").is_dir(), "what differs is left for a look at it"


@pytest.mark.parametrize(
    ("plant", "seen"),
    [(lose_the_cursor, "loss after resuming, weights after resuming"), many(decay_nothing, "weights at the end")],
)
def test_a_failed_proof_ends_with_the_code_of_numerics(tmp_path, cache_dir, capfd, plant, seen):
    codes = prove(tmp_path, 1, "strategy=single", plant=plant, start=as_command)
    said = capfd.readouterr().err
    assert codes == [5]
    assert said.count("Numerics error") == 1
    assert re.search(rf"where: .*{seen}", said)
    assert (tmp_path / "prove" / "layout").is_dir(), "what differs is left for a look at it"


def test_the_run_on_one_process_says_why_it_failed(tmp_path, cache_dir, capfd):
    with pytest.raises(RankFailed, match="the run on one process failed"):
        prove(tmp_path, 1, "strategy=single", plant=break_the_other_process)
    assert "this is neither auto, nor never, nor a folder" in capfd.readouterr().err


def break_the_other_process():
    original = parity._train_single

    def with_a_missing_checkpoint(config, recipe):
        config.checkpoint.resume = str(recipe)
        original(config, recipe)

    parity._train_single = with_a_missing_checkpoint
