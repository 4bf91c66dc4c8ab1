"""The part of a run that lets the exported model continue a prompt, opened as a user would open it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfdist.config.run import Chat
from hfdist.config.task import Head
from hfdist.data.documents.examples import Example, take_examples
from hfdist.data.tokenization.pair_encoder import PairEncoder
from hfdist.models.heads import head_class
from hfdist.models.position_limit import most_positions
from hfdist.run.parts.part import Part, warning_of_failure
from hfdist.run.state import RunState
from hfdist.trainer.evaluation.generation import encode_prompts

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 600
"""The most characters that are logged of a prompt, and of an answer."""


class SamplePart(Part):
    """Logs how the model continues `report.sample_prompt`, or answers a held-out example."""

    def finish(self, run: RunState) -> None:
        """Log the sample, unless a budget has stopped the run: to write one takes long."""
        if run.config.report.sample_tokens == 0 or run.budget.stopped_by is not None:
            return
        with warning_of_failure("sample"):
            self._show(run)

    def _show(self, run: RunState) -> None:
        question, folder, strategy = _find_question(run), run.outcome.folder, run.trainer.strategy
        if question is None:
            return
        assert strategy is not None
        tokenizer, report = run.data.tokenizer, run.config.report
        head = run.config.task.name.traits.head
        with strategy.without_partitioning(run.trainer.args):
            # The class is known here: an adapter's folder has no config of the model, which would tell it.
            model = head_class(head, run.model.config).auto.from_pretrained(folder).eval()
            if head is Head.targets:
                text = write_target(model, tokenizer, question.prompt, report.sample_tokens)
            else:
                is_free = report.sample_prompt is not None
                text = sample(model, tokenizer, question.prompt, report.sample_tokens, is_free=is_free)
        logger.info("%s:\n%s", question.text, text)


class _Question(NamedTuple):
    """A prompt that the model is to continue."""

    prompt: Sequence[int]
    """Tokens of the prompt."""
    text: str
    """What the log says of it, before the model's answer."""


def _find_question(run: RunState) -> _Question | None:
    """Give the prompt of the config, or of the first held-out example; None: there is none."""
    config, tokenizer, folder = run.config, run.data.tokenizer, run.outcome.folder
    prompt, traits = config.report.sample_prompt, config.task.name.traits
    if prompt is not None:
        if traits.head is Head.targets:
            ids = PairEncoder(tokenizer, config.data.pairs).source(prompt)
        else:
            [ids] = encode_prompts(tokenizer, [prompt], Chat.never, config.data.chat)
        return _Question(ids, f"{folder} continues {prompt!r}")
    example = held_out_example(run)
    if example is None or traits.is_reinforcement:
        # A policy's answers are in rollouts.jsonl already.
        return None
    asked = str(tokenizer.decode(example.prompt, skip_special_tokens=True))
    answer = str(tokenizer.decode(example.reference, skip_special_tokens=True))
    if len(asked) > _SHOWN_CHARACTERS:
        asked = f"...{asked[-_SHOWN_CHARACTERS:]}"
    if len(answer) > _SHOWN_CHARACTERS:
        answer = f"{answer[:_SHOWN_CHARACTERS]}..."
    return _Question(example.prompt, f"{folder} is asked {asked!r}; the data answer {answer!r}, it")


def held_out_example(run: RunState) -> Example | None:
    """Give the first held-out example of what the model has learned to answer; None: its data are plain text."""
    data = run.data
    if not run.config.task.name.traits.writes_text or data.held_out is None or not data.corpus.has_examples:
        return None
    return next(iter(take_examples(data.held_out, 1)), None)


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], num_tokens: int, *, is_free: bool
) -> str:
    """Let a model continue a prompt by at most `num_tokens`, and give the text of the new tokens.

    `is_free`: by top-k sampling with a fixed seed, as a text that goes on greedily repeats itself; otherwise greedily.
    """
    choice = {"do_sample": True, "top_k": 40, "temperature": 0.8} if is_free else {"do_sample": False}
    generate: Any = model.generate
    positions = most_positions(model.config)
    # Of a prompt that is too long the end stays: the question stands there.
    room = max(positions - num_tokens, 1) if positions is not None else len(prompt)
    inputs = torch.tensor([list(prompt)[-room:]])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        output = generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            **choice,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))


def write_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[int], num_tokens: int
) -> str:
    """Let an encoder-decoder write the target of `source` as its generation config says, and give the text."""
    generate: Any = model.generate
    with torch.no_grad():
        output = generate(input_ids=torch.tensor([list(source)]), max_new_tokens=num_tokens)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
