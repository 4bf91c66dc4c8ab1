"""The exported model: its card, adapters merged into it, the Hub."""
