"""From documents in a lane's order to sequences: end to end, whole and filled, or one each."""
