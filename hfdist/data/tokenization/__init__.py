"""The encoding of rows: texts, conversations, pairs and labels become token ids and targets."""
