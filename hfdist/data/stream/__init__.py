"""The training stream: sequences of lanes for this data rank, read ahead, with a cursor and a ledger."""
