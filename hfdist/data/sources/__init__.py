"""The sources of documents: a source lists its shards with their numbers of rows, and a shard reads rows by number."""
