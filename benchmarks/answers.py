"""Answers of uneven and of equal lengths, and several to one prompt: tokens per second beside `generate`.

python -m benchmarks.answers --write
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from benchmarks.rounds import cpu_seconds_of, interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.strategies.engine import Batch, Function
from hfdist.topology import Topology
from hfdist.trainer.generation.continuation import continue_rows
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.score import Choice

_WIDTH, _INNER_WIDTH, _LAYERS, _VOCABULARY, _END = 256, 688, 4, 4096, 1
_MEAN_TOKENS, _SPREAD, _MOST_TOKENS = 72, 0.75, 236
"""Of the lengths of uneven answers: the mean, the deviation of the logarithm, and the longest."""


class Case(NamedTuple):
    """Prompts, and how long their answers are."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    slots: int
    goal: float | None
    """At least so many times the speed of `generate`; None: no goal."""


def main() -> None:
    """Measure all, and print or write the section."""
    options = read_options("answers", __doc__, rounds=3)
    cases = _cases(is_quick=options.quick)
    model = _make_model()
    found = {}
    for case in cases:
        runs = {"hfdist": lambda case=case: _answer(model, case), "generate": lambda case=case: _generate(model, case)}
        assert runs["hfdist"]() == runs["generate"](), "the same tokens"
        timed = {name: (lambda run=run: cpu_seconds_of(run)) for name, run in runs.items()}
        found[case.name] = {
            name: sum(case.lengths) / seconds
            for name, seconds in medians(interleave(timed, options.rounds, num_warm_up=0)).items()
        }
    publish(options, "answers", _section(options, cases, found), _measures(cases, found))


def _cases(*, is_quick: bool) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    num_rows, shared = (6, 16) if is_quick else (64, 512)

    def draw(length: int) -> list[int]:
        return torch.randint(2, _VOCABULARY, (length,), generator=generator).tolist()

    prompts = [draw(length) for length in torch.randint(8, 48, (num_rows,), generator=generator).tolist()]
    # Quantiles of the distribution, in a random order: no draw makes it another one.
    normal = statistics.NormalDist(math.log(_MEAN_TOKENS) - _SPREAD**2 / 2, _SPREAD)
    logarithms = [normal.inv_cdf((place + 0.5) / num_rows) for place in range(num_rows)]
    ordered = [min(round(math.exp(value)), _MOST_TOKENS) for value in logarithms]
    uneven = [ordered[place] for place in torch.randperm(num_rows, generator=generator).tolist()]
    groups = [prompt for prompt in (draw(shared) for _ in range(4)) for _ in range(8)]
    equal = [_MEAN_TOKENS] * num_rows
    return [
        Case("uneven answers", prompts, uneven, num_rows, 2.5),
        Case("uneven answers, 16 slots", prompts, uneven, 16, None),
        Case("equal answers", prompts, equal, num_rows, 1.25),
        Case(f"8 answers to each of 4 prompts of {shared} tokens", groups, equal[:1] * len(groups), len(groups), None),
    ]


def _make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=_INNER_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def _end_at(scores: torch.Tensor, is_last: torch.Tensor) -> torch.Tensor:
    """Let rows end where they are to end, and nowhere else; `is_last`: whether this token is the last; [rows, 1]."""
    scores[:, _END] = torch.where(is_last.squeeze(-1), torch.inf, -torch.inf)
    return scores


def _answer(model: Any, case: Case) -> list[list[int]]:
    @torch.no_grad()
    def forward(batch: Batch, function: Function, *, as_whole: bool = False) -> list[Any]:
        return [function(model, batch)]

    return continue_rows(
        case.prompts,
        forward,
        GenerationLimits(max_new_tokens=_MOST_TOKENS, end_ids=frozenset({_END}), most_tokens=None),
        choice=Choice(
            lambda logits, extras, num_before: _end_at(logits, extras["lengths"] - 1 == num_before),
            {"lengths": torch.tensor(case.lengths)[:, None]},
        ),
        topology=Topology(),
        rows_at_once=case.slots,
        uses_cache=True,
    )


class _Ends(LogitsProcessor):
    def __init__(self, case: Case, num_prompt_tokens: int) -> None:
        self._lengths, self._num_prompt_tokens = torch.tensor(case.lengths)[:, None], num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return _end_at(scores, self._lengths - 1 == input_ids.shape[1] - self._num_prompt_tokens)


def _generate(model: Any, case: Case) -> list[list[int]]:
    """All rows in one batch, until the longest has ended."""
    longest = max(map(len, case.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in case.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in case.prompts])
    written = model.generate(
        ids,
        attention_mask=mask,
        generation_config=GenerationConfig(max_new_tokens=_MOST_TOKENS, eos_token_id=_END, pad_token_id=0),
        logits_processor=LogitsProcessorList([_Ends(case, longest)]),
    )
    return [row[:length] for row, length in zip(written[:, longest:].tolist(), case.lengths, strict=True)]


def _measures(cases: list[Case], found: dict[str, dict[str, float]]) -> list[Measure]:
    return [
        Measure(
            what=case.name,
            unit="tokens per CPU second",
            ours=found[case.name]["hfdist"],
            peers={"generate": found[case.name]["generate"]},
            goal=f">= {case.goal}x generate",
            is_met=found[case.name]["hfdist"] >= case.goal * found[case.name]["generate"],
        )
        for case in cases
        if case.goal is not None
    ]


def _section(options: argparse.Namespace, cases: list[Case], found: dict[str, dict[str, float]]) -> str:
    rows = []
    for case in cases:
        ours, theirs = found[case.name]["hfdist"], found[case.name]["generate"]
        rows.append([case.name, str(len(case.prompts)), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}"])
    return (
        f"## Answers of uneven lengths\n\nA Llama of {_LAYERS} blocks of width {_WIDTH}, a vocabulary of "
        f"{_VOCABULARY:,}; float32, one thread. Prompts of 8 to 47 tokens but for the last line. Uneven: log-normal "
        f"lengths, {_MEAN_TOKENS} tokens in the mean, {_MOST_TOKENS} at most; else {_MEAN_TOKENS} each. Both write the "
        "same tokens, the likeliest; `generate` has all rows in one batch. "
        f"Medians of {options.rounds} interleaved rounds.\n\n"
        f"{describe_run('benchmarks.answers', 'torch', 'transformers')}\n\n"
        + markdown(["", "rows", "hfdist: tokens per CPU second", "generate", "hfdist / generate"], rows)
    )


if __name__ == "__main__":
    main()
