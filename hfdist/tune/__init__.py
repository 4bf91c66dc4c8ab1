"""What a run trains besides the next token: preferences, rewards, policies; each a loss that is a sum over items."""
