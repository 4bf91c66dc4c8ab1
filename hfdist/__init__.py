"""hfdist: distributed training of Hugging Face language models, from one config."""

__version__ = "0.1.0"
