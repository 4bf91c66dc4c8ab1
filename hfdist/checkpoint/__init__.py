"""Checkpoints by parameter name: plain safetensors and JSON that any layout can write and read."""
