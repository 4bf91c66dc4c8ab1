"""A corpus tokenized once, into token files, by several processes."""
