"""One training step: the loss and what it counts, the loss over routers, rows for each data rank, its clock."""
