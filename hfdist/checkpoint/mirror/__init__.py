"""Checkpoints at an address that outlives the machine: what lies there, how it gets there, and how it comes back."""

from hfdist.checkpoint.mirror.find import fetch_best, fetch_newer
from hfdist.checkpoint.mirror.mirror import Mirror
from hfdist.checkpoint.mirror.objects import Objects
from hfdist.checkpoint.mirror.uploader import Upload, Uploader

__all__ = ["Mirror", "Objects", "Upload", "Uploader", "fetch_best", "fetch_newer"]
