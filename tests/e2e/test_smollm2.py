"""A real pretrained model, tied, of 30 blocks: fine-tuned through a pipeline as in one process, in less memory."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.test_launch import LAUNCH, RECIPE, ROOT, lines, run
from tests.smollm2 import write_smollm2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRAIN = ("model=hub", "data=stdlib", "data.sequence_length=32", "data.eval_sequences=4", "data.workers=1",
         "train.max_steps=10", "train.global_batch_size=4", "train.micro_batch_size=1", "optimizer.lr=1e-5",
         "optimizer.warmup_steps=1", "checkpoint=none", "report=quiet")  # fmt: skip


def peaks_mib(output):
    (peaks,) = re.findall(r"peak memory: host ([\d, ]+) MiB by rank", output)
    return [int(peak.replace(",", "")) for peak in peaks.split(", ")]


def test_two_ranks_fine_tune_it_as_one_process_does(tmp_path, cache_dir):
    model = f"model.name={write_smollm2(tmp_path / 'smollm2')}"
    code, single = run([*LAUNCH[:1], RECIPE, *TRAIN, model, "strategy=single", "run.name=single"], tmp_path, 280)
    assert code == 0, single
    launch = [*LAUNCH, "--config_file", ROOT / "conf" / "launch" / "cpu_2.yaml", RECIPE]
    code, split = run([*launch, *TRAIN, model, "strategy=pipeline", "run.name=split"], tmp_path, 280)
    assert code == 0, split

    ours, reference = ([line["loss"] for line in lines(tmp_path / "runs" / name) if "loss" in line]
                       for name in ("split", "single"))  # fmt: skip
    assert len(ours) == 10
    assert ours == pytest.approx(reference, rel=1e-5)
    # One copy of weights, gradients and two averages of Adam is 2.0 GiB; besides, a process takes about 0.7.
    (whole,) = peaks_mib(single)
    assert all(peak < 0.8 * whole for peak in peaks_mib(split)), (whole, peaks_mib(split))

    folder = tmp_path / "runs" / "split" / "model"
    tokenizer, exported = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = exported.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
