"""Conversations as tokens and targets: a chat template renders them, and their turns are found in what it writes."""
