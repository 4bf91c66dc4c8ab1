"""Environments: what a model acts in, turn by turn, while it learns from rewards. Loads no torch."""

from hfdist.environments.environment import Environment, Row, Step, ToolError

__all__ = ["Environment", "Row", "Step", "ToolError"]
