"""The Hugging Face Trainer with an engine under it, and what people see of a run."""
