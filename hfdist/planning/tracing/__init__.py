"""What one rank of a layout holds and computes, traced on fake tensors."""
