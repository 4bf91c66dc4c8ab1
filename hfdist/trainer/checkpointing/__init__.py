"""What a checkpoint of the Trainer holds besides tensors, and how a run goes on from one."""
