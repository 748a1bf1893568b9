"""From tasks to batches: the task stream, the staleness buffer, samples and flat tensors."""
