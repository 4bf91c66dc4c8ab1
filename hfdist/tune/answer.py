"""What the model has said to a prompt: one turn, or an episode with an environment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hfdist.rewards.generation import Turn


@dataclass(kw_only=True)
class Answer:
    """The tokens after a prompt, exactly as they were drawn and read."""

    tokens: list[int] = field(default_factory=list)
    is_drawn: list[bool] = field(default_factory=list)
    """Which tokens the model has drawn; the others are what it has read of an environment."""
    has_ended: bool = False
    """Whether the model has ended it, or the environment; else it was cut off."""
    log_probabilities: list[float] | None = None
    """Those of the drawn tokens at that time; None: they are not recorded, as the weights of this step draw them."""
    turns: list[Turn] = field(default_factory=list)
    """What was said in an episode. What the model has read is known on the first rank of a model replica alone."""
    num_turns: int = 0
    """Turns of the model."""
    num_calls: int = 0
    """Tools that it has called."""
    reward: float = 0.0
    """What the environment has given."""
    fault: str | None = None
    """Why the environment has failed; None: it has not."""

    @classmethod
    def of(
        cls, tokens: list[int], log_probabilities: list[float] | None = None, *, end_ids: Collection[int] = ()
    ) -> Answer:
        """Make an answer of one turn, all of which the model has drawn, and which one of `end_ids` may have ended."""
        made = cls(has_ended=bool(tokens) and tokens[-1] in end_ids)
        made.draw(tokens, log_probabilities)
        return made

    def draw(self, tokens: list[int], log_probabilities: list[float] | None) -> None:
        """Add what the model has drawn."""
        self.tokens += tokens
        self.is_drawn += [True] * len(tokens)
        if log_probabilities is not None:
            self.log_probabilities = (self.log_probabilities or []) + log_probabilities

    def read(self, tokens: list[int]) -> None:
        """Add what the model has read."""
        self.tokens += tokens
        self.is_drawn += [False] * len(tokens)
