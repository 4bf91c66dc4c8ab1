"""How long a step takes: hardware, what ranks send, and what past runs correct."""
