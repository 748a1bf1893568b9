"""The loss algebra: pure functions on [N] tensors."""
