"""A real pretrained model, tied, of 30 blocks, from its GGUF file: fine-tuned on conversations through a pipeline."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.runs import eval_losses, losses
from tests.e2e.forked import run_forked
from tests.e2e.test_launch import ROOT, forked_ranks  # noqa: F401
from tests.smollm2 import find_smollm2

# `make finetuning` trains it in four layouts.
pytestmark = [pytest.mark.e2e, pytest.mark.many, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "finetune.py"
TRAIN = ("data=docstrings", "data.sequence_length=64", "data.eval_sequences=2", "data.workers=1", "train.epochs=null",
         "train.max_steps=2", "train.global_batch_size=2", "train.micro_batch_size=1", "optimizer.lr=1e-4",
         "checkpoint=none", "checkpoint.keep_best=false", "report=quiet")  # fmt: skip
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def answer(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def peaks_mib(output):
    (line,) = re.findall(r"\n  peak +host (.+)", output)
    return [float(size) * {"MiB": 1, "GiB": 1024}[unit] for size, unit in re.findall(r"([\d.]+) ([MG]iB)", line)]


def tune(folder, *overrides):
    done = run_forked(
        *TRAIN, f"model.name={find_smollm2()}", *overrides, cwd=folder, script=RECIPE, timeout_seconds=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_two_ranks_fine_tune_it_as_one_process_does(tmp_path, cache_dir, short_library, forked_ranks):  # noqa: F811
    single = tune(tmp_path, "strategy=single", "run.name=single")
    split = tune(tmp_path, "strategy=pipeline", "launch.processes=2", "run.name=split")
    ours, reference = (tmp_path / "runs" / name for name in ("split", "single"))
    assert len(losses(ours)) == 2
    assert losses(ours) == pytest.approx(losses(reference), rel=1e-5)
    before, after = eval_losses(ours)
    assert after < before
    assert [before, after] == pytest.approx(eval_losses(reference), rel=1e-5)
    # One copy of weights, gradients and two averages of Adam is 2.0 GiB; besides, a process takes about 0.7.
    (whole,) = peaks_mib(single)
    assert all(peak < 0.85 * whole for peak in peaks_mib(split)), (whole, peaks_mib(split))
    assert "Paris" in answer(tmp_path / "runs" / "split" / "model")
