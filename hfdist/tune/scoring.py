"""Answers as rewards read them, and their scores."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hfdist.data.documents.examples import Example
from hfdist.rewards import Generation, Reward
from hfdist.rewards.registry import Steps
from hfdist.tune.answer import Answer
from hfdist.tune.step_rewards import add_up, total


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
                prompt=self.text(example.prompt),
                text=_last_turn(answer) if answer.num_turns else self.text(answer.tokens),
                reference=self.text(example.reference),
                columns=example.columns,
                token_ids=(*example.prompt, *answer.tokens),
                num_tokens=len(answer.tokens),
                most_tokens=self._most_tokens,
                turns=tuple(answer.turns),
                environment_reward=answer.reward,
            )
            for example, answer in zip(examples, answers, strict=True)
        ]

    def score(
        self, generations: Sequence[Generation], answers: Sequence[Answer]
    ) -> tuple[dict[str, list[float]], list[Steps]]:
        """Score on this rank: the weighted sums and each reward by its name; and the steps of all rewards together.

        An episode that has failed gets 0, and one that has not, one reward for all its turns.
        """
        sound = [place for place, answer in enumerate(answers) if answer.fault is None]
        weights = [reward.weight for reward in self._rewards]
        given = [reward([generations[place] for place in sound]) for reward in self._rewards]
        named = {f"rewards/{reward.name}": [0.0] * len(answers) for reward in self._rewards}
        steps: list[Steps] = [[(len(one.text), 0.0)] for one in generations]
        for place, own in zip(sound, zip(*given, strict=True), strict=True):
            for values, score in zip(named.values(), own, strict=True):
                values[place] = total(score)
            whole = answers[place].num_turns > 0
            scores = [total(score) for score in own] if whole else own
            steps[place] = add_up(scores, weights, len(generations[place].text))
        return {"reward": list(map(total, steps))} | named, steps

    def text(self, ids: Sequence[int]) -> str:
        """Give the text of tokens, as rewards read it."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _last_turn(answer: Answer) -> str:
    return next((turn.text for turn in reversed(answer.turns) if turn.role == "assistant"), "")
