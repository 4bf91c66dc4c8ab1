"""Pages and tables of docs/ that are made from the code: `make docs` writes them, and a test holds them up to date."""
