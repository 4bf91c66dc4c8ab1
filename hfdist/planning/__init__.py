"""What a run will need, known before it starts: memory, time, traffic and cost of any layout on any hardware."""
