"""Checkpoints by parameter name: plain safetensors and JSON that any layout can write and read."""

from hfdist.checkpoint.async_saver import Saver
from hfdist.checkpoint.export import export_model
from hfdist.checkpoint.folder import Keep, find_newest, prune, verify_together
from hfdist.checkpoint.lanes_file import read_lanes, write_lanes
from hfdist.checkpoint.manifest import verify
from hfdist.checkpoint.random_state import restore_random_state
from hfdist.checkpoint.read import read_checkpoint
from hfdist.checkpoint.replicas import Replicas
from hfdist.checkpoint.saved import read_state

__all__ = [
    "Keep",
    "Replicas",
    "Saver",
    "export_model",
    "find_newest",
    "prune",
    "read_checkpoint",
    "read_lanes",
    "read_state",
    "restore_random_state",
    "verify",
    "verify_together",
    "write_lanes",
]
