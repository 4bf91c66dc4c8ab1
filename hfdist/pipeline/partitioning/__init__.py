"""Which blocks each stage gets: costs, measured or by formula, and the search for stages of equal work."""
