"""Rewards of reinforcement learning: functions that score completions, by name. Loads no torch."""

from hfdist.rewards.generation import Generation
from hfdist.rewards.registry import Reward, load_rewards

__all__ = ["Generation", "Reward", "load_rewards"]
