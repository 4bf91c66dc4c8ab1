"""A Trainer that is an island: it trains one model with other launches."""
