"""What a run uses over all of its starts: hours, energy, money; and its end once a budget is used up."""
