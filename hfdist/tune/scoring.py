"""Answers as rewards read them, and their scores."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hfdist.data.documents.examples import Example
from hfdist.rewards import Generation, Reward
from hfdist.tune.answer import Answer


class Scoring:
    """The rewards of a run.

    Args:
        rewards: functions that score answers.
        tokenizer: tokenizer of the model.
        most_tokens: the most tokens that an answer may have.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> None:
        self._rewards, self._tokenizer, self._most_tokens = rewards, tokenizer, most_tokens
        self.names = ("reward", *(f"rewards/{reward.name}" for reward in rewards))
        """Names of the figures that `score` gives."""

    def describe(self, examples: Sequence[Example], answers: Sequence[Answer]) -> list[Generation]:
        """Make what rewards read of answers."""
        return [
            Generation(
                prompt=self._text(example.prompt),
                text=_last_turn(answer) if answer.num_turns else self._text(answer.tokens),
                reference=self._text(example.reference),
                columns=example.columns,
                token_ids=(*example.prompt, *answer.tokens),
                num_tokens=len(answer.tokens),
                most_tokens=self._most_tokens,
                turns=tuple(answer.turns),
                environment_reward=answer.reward,
            )
            for example, answer in zip(examples, answers, strict=True)
        ]

    def score(self, generations: Sequence[Generation], answers: Sequence[Answer]) -> dict[str, list[float]]:
        """Score on this rank: the weighted sums, and each reward by its name. An episode that has failed gets 0."""
        sound = [place for place, answer in enumerate(answers) if answer.fault is None]
        scores = {"reward": [0.0] * len(answers)}
        for reward in self._rewards:
            own = scores[f"rewards/{reward.name}"] = [0.0] * len(answers)
            for place, value in zip(sound, reward([generations[place] for place in sound]), strict=True):
                own[place] = value
                scores["reward"][place] += reward.weight * value
        return scores

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _last_turn(answer: Answer) -> str:
    return next((turn.text for turn in reversed(answer.turns) if turn.role == "assistant"), "")
