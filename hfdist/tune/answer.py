"""What the model has said to a prompt: one turn, or an episode with an environment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hfdist.rewards.generation import Turn


@dataclass(kw_only=True)
class Answer:
    """The tokens after a prompt, exactly as they were drawn and read."""

    tokens: list[int] = field(default_factory=list)
    """Tokens that the model has drawn, and tokens that it has read between its turns, in order."""
    is_drawn: list[bool] = field(default_factory=list)
    """Whether the model has drawn each token; it has read the others from an environment."""
    has_ended: bool = False
    """Whether the model or the environment has ended the answer; else it was cut off."""
    log_probabilities: list[float] | None = None
    """Log-probability of each drawn token when it was drawn; None: not recorded, as the weights of this step draw."""
    turns: list[Turn] = field(default_factory=list)
    """What was said in an episode. What the model has read is known on the first rank of a model replica alone."""
    num_turns: int = 0
    """Number of turns that the model has taken in an episode; 0: it had none, or the answer is no episode."""
    num_calls: int = 0
    """Number of tools that the model has called."""
    reward: float = 0.0
    """Sum of the rewards that the environment has given."""
    fault: str | None = None
    """Why the environment has failed; None: it has not."""

    @classmethod
    def of(
        cls, tokens: list[int], log_probabilities: list[float] | None = None, *, end_ids: Collection[int] = ()
    ) -> Answer:
        """Make an answer of one turn, all of whose tokens the model has drawn.

        Args:
            tokens: tokens of the answer.
            log_probabilities: log-probability of each token; None: not recorded.
            end_ids: tokens that end an answer.
        """
        made = cls(has_ended=bool(tokens) and tokens[-1] in end_ids)
        made.draw(tokens, log_probabilities)
        return made

    def draw(self, tokens: list[int], log_probabilities: list[float] | None) -> None:
        """Add tokens that the model has drawn, with the log-probability of each if they are recorded."""
        self.tokens += tokens
        self.is_drawn += [True] * len(tokens)
        if log_probabilities is not None:
            self.log_probabilities = (self.log_probabilities or []) + log_probabilities

    def read(self, tokens: list[int]) -> None:
        """Add tokens that the model has read."""
        self.tokens += tokens
        self.is_drawn += [False] * len(tokens)
