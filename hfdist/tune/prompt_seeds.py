"""The seeds of a prompt's answers: they follow from the prompt's number in the run's data, which no layout changes."""

from __future__ import annotations

import hashlib

from hfdist.trainer.training import Training


def prompt_numbers(training: Training, num_prompts: int) -> list[int]:
    """Give the numbers, in the run's data, of the last `num_prompts` prompts that this rank has read.

    Data ranks take prompts in turns: with 2 data ranks, rank 0 reads 0, 2, 4, and rank 1 reads 1, 3, 5.
    """
    topology = training.strategy.topology
    first = training.num_samples() - num_prompts * topology.data
    return [first + place * topology.data + topology.data_rank for place in range(num_prompts)]


def episode_name(seed: int, number: int) -> str:
    """Give the name of a prompt's episodes, from which the seeds of environments follow.

    Args:
        seed: seed of the run.
        number: number of the prompt in the run's data.
    """
    return f"{seed}:{number}"


def answer_seeds(seed: int, number: int, count: int) -> list[int]:
    """Give a seed of 64 bits for each of `count` answers to a prompt.

    Args:
        seed: seed of the run.
        number: number of the prompt in the run's data.
        count: number of answers.
    """
    seeds = []
    for answer in range(count):
        digest = hashlib.blake2b(f"{seed}:{number}:{answer}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little"))
    return seeds
