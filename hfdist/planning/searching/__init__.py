"""Which layouts fit and are fastest: closed forms of a model's constants, and a search over all layouts."""
