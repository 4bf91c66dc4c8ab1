"""What the trained model writes after a prompt, as a user would ask it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.trainer.run.parts.part import Part, warning_of_failure
from hfdist.trainer.run.state import RunState

logger = logging.getLogger(__name__)


class SamplePart(Part):
    """Logs how the model continues `report.sample_prompt`."""

    def finish(self, run: RunState) -> None:
        """Do so, unless a budget has stopped the run: it takes long."""
        report, folder, strategy = run.config.report, run.outcome.folder, run.trainer.strategy
        prompt = report.sample_prompt
        if prompt is None or run.budget.stopped_by is not None:
            return
        assert strategy is not None
        with strategy.without_partitioning(run.trainer.args), warning_of_failure("sample"):
            logger.info("%s continues %r:\n%s", folder, prompt, sample(folder, prompt, report.sample_tokens))


def sample(folder: Path, prompt: str, num_tokens: int) -> str:
    """Open the exported folder as any user would, and let the model continue `prompt` (top-k sampling, fixed seed)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        output = model.generate(
            **inputs,
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=40,
            temperature=0.8,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
