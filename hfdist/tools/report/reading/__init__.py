"""From the files of a run folder to figures: only what is new is read, and nothing in them is trusted."""
