"""Checkpoints by parameter name: plain safetensors and JSON that any layout can write and read."""

from hfdist.checkpoint.folder import find_newest, prune
from hfdist.checkpoint.manifest import verify
from hfdist.checkpoint.random_state import restore_random_state
from hfdist.checkpoint.read import read_checkpoint
from hfdist.checkpoint.write import export_model, write_checkpoint

__all__ = [
    "export_model",
    "find_newest",
    "prune",
    "read_checkpoint",
    "restore_random_state",
    "verify",
    "write_checkpoint",
]
