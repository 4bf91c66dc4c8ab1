"""Mirrors: copies of a run's checkpoints at an address of a store, such as a bucket, that outlives the machine."""

from hfdist.checkpoint.mirror.find import fetch_best, fetch_newer
from hfdist.checkpoint.mirror.mirror import Mirror
from hfdist.checkpoint.mirror.objects import Objects
from hfdist.checkpoint.mirror.uploader import Upload, Uploader

__all__ = ["Mirror", "Objects", "Upload", "Uploader", "fetch_best", "fetch_newer"]
