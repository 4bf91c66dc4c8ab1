"""What the trained model writes after a prompt, as a user would ask it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from hfdist.config.task import Head
from hfdist.data.documents.examples import Example, take_examples
from hfdist.data.tokenization.pair_encoder import PairEncoder
from hfdist.models.heads import head_class
from hfdist.run.parts.part import Part, warning_of_failure
from hfdist.run.state import RunState

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 600


class SamplePart(Part):
    """Logs how the model continues `report.sample_prompt`, or answers a held-out example."""

    def finish(self, run: RunState) -> None:
        """Write the samples, unless a budget has stopped the run: it takes long."""
        if run.config.report.sample_tokens == 0 or run.budget.stopped_by is not None:
            return
        with warning_of_failure("sample"):
            self._show(run)

    def _show(self, run: RunState) -> None:
        report, folder, strategy = run.config.report, run.outcome.folder, run.trainer.strategy
        tokenizer, ids, is_free = run.data.tokenizer, None, report.sample_prompt is not None
        what = f"{folder} continues {report.sample_prompt!r}"
        writes_targets = run.config.task.name.traits.head is Head.targets
        if report.sample_prompt is not None:
            pairs = PairEncoder(tokenizer, run.config.data.pairs)
            ids = pairs.source(report.sample_prompt) if writes_targets else tokenizer(report.sample_prompt)["input_ids"]
        elif (example := held_out_example(run)) is not None and not run.config.task.name.traits.is_reinforcement:
            # Of a policy, rollouts.jsonl has answers.
            ids = example.prompt
            asked, answer = (str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids, example.reference))
            asked = asked if len(asked) <= _SHOWN_CHARACTERS else f"...{asked[-_SHOWN_CHARACTERS:]}"
            answer = answer if len(answer) <= _SHOWN_CHARACTERS else f"{answer[:_SHOWN_CHARACTERS]}..."
            what = f"{folder} is asked {asked!r}; the data answer {answer!r}, it"
        if ids is None:
            return
        assert strategy is not None
        with strategy.without_partitioning(run.trainer.args):
            if writes_targets:
                text = write_target(folder, tokenizer, ids, report.sample_tokens)
            else:
                text = sample(folder, tokenizer, ids, report.sample_tokens, is_free=is_free)
        logger.info("%s:\n%s", what, text)


def held_out_example(run: RunState) -> Example | None:
    """Give the first held-out example of what the model has learned to answer; None: its data are plain text."""
    data = run.data
    if not run.config.task.name.traits.writes_text or data.held_out is None or not data.corpus.has_examples:
        return None
    return next(iter(take_examples(data.held_out, 1)), None)


def sample(
    folder: Path, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], num_tokens: int, *, is_free: bool
) -> str:
    """Open the exported folder as any user would, and let the model continue `prompt`.

    Gives what it has written: freely, by top-k sampling with a fixed seed, or greedily.
    """
    choice = {"do_sample": True, "top_k": 40, "temperature": 0.8} if is_free else {"do_sample": False}
    model = head_class(Head.tokens, AutoConfig.from_pretrained(folder)).auto.from_pretrained(folder).eval()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # The end of a prompt asks.
    room = max(positions - num_tokens, 1) if isinstance(positions, int) and positions > 0 else len(prompt)
    inputs = torch.tensor([list(prompt)[-room:]])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            **choice,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))


def write_target(folder: Path, tokenizer: PreTrainedTokenizerBase, source: Sequence[int], num_tokens: int) -> str:
    """Let an encoder-decoder write the target of `source`, as its generation config has it."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    with torch.no_grad():
        output = model.generate(input_ids=torch.tensor([list(source)]), max_new_tokens=num_tokens)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
