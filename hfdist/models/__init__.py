"""Models and tokenizers of transformers: from the Hub, a folder, or random weights."""
