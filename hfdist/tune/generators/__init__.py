"""Generators: processes beside the ranks of a run that answer its prompts, while the ranks train."""
