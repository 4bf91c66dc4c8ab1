"""Which number a prompt has in the run's data, and what follows from it for its answers. No layout changes it."""

from __future__ import annotations

import hashlib

from hfdist.trainer.training import Training


def prompt_numbers(training: Training, num_prompts: int) -> list[int]:
    """Give the numbers in the run's data of the prompts that this rank has read last."""
    topology = training.strategy.topology
    first = training.num_samples() - num_prompts * topology.data
    return [first + place * topology.data + topology.data_rank for place in range(num_prompts)]


def episode_name(seed: int, number: int) -> str:
    """Give the name of the episodes of the prompt with this number, from which the seeds of environments follow."""
    return f"{seed}:{number}"


def answer_seeds(seed: int, number: int, count: int) -> list[int]:
    """Give a seed for each of `count` answers to the prompt with this number, in a run with this seed."""
    texts = (f"{seed}:{number}:{own}" for own in range(count))
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return [int.from_bytes(digest, "little") for digest in digests]
