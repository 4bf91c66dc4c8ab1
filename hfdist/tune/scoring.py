"""The rewards of a run, applied to answers: what a reward reads of an answer, and the sum of all rewards."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hfdist.data.documents.examples import Example
from hfdist.rewards import Generation, Reward
from hfdist.rewards.registry import Steps
from hfdist.tune.answer import Answer
from hfdist.tune.step_rewards import add_up, total


class Scoring:
    """Describes answers for the rewards of a run, and scores them.

    Args:
        rewards: functions that score answers, with their names and weights.
        tokenizer: tokenizer of the model.
        most_tokens: the most tokens that an answer may have.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: PreTrainedTokenizerBase, most_tokens: int) -> None:
        self._rewards, self._tokenizer, self._most_tokens = rewards, tokenizer, most_tokens
        self.names = ("reward", *(f"rewards/{reward.name}" for reward in rewards))
        """Names of the figures that `score` gives."""

    def describe(self, examples: Sequence[Example], answers: Sequence[Answer]) -> list[Generation]:
        """Make of each example and its answer what rewards read; of an episode the text is the model's last turn."""
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
        """Score answers on this rank. Episodes that have failed get 0 from each reward.

        Args:
            generations: what `describe` has made of the answers.
            answers: the answers.

        Returns:
            Figures by their names: the weighted sum of all rewards, and each reward, of each answer. And the weighted
            sum of all rewards for each step of each answer; an episode is one step.
        """
        sound = [place for place, answer in enumerate(answers) if answer.fault is None]
        weights = [reward.weight for reward in self._rewards]
        # A list of scores for each reward, then the scores of all rewards for each answer.
        by_reward = [reward([generations[place] for place in sound]) for reward in self._rewards]
        by_answer = zip(*by_reward, strict=True)
        figures = {f"rewards/{reward.name}": [0.0] * len(answers) for reward in self._rewards}
        steps: list[Steps] = [[(len(generation.text), 0.0)] for generation in generations]
        for place, scores in zip(sound, by_answer, strict=True):
            for values, score in zip(figures.values(), scores, strict=True):
                values[place] = total(score)
            is_episode = answers[place].num_turns > 0
            added = [total(score) for score in scores] if is_episode else scores
            steps[place] = add_up(added, weights, len(generations[place].text))
        return {"reward": list(map(total, steps))} | figures, steps

    def text(self, ids: Sequence[int]) -> str:
        """Give the text of tokens as rewards read it: without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def _last_turn(answer: Answer) -> str:
    """Give the text of the model's last turn in an episode; "": the model has taken none."""
    for turn in reversed(answer.turns):
        if turn.role == "assistant":
            return turn.text
    return ""
