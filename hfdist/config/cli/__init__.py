"""The command line of a recipe: flags, errors and exit codes, and the end of the process."""
