"""The learner: model, log-probabilities, optimizer step, weights, checkpoints."""
