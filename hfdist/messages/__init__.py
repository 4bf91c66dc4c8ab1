"""What comes over sockets: one reader of messages, who may speak, and for how long one may say nothing.

A message is a line with a JSON object. If it has the key `bytes`, so many bytes follow.
"""
