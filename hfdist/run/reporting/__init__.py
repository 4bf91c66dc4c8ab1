"""What people and scripts see of a run: summary, progress, metrics.jsonl, pictures."""
