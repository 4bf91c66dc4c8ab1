"""The model writes, in the layout that trains: the likeliest tokens, or sampled ones."""
