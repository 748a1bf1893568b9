"""Asynchronous reinforcement learning of tool-using language-model agents, with the mismatch kept visible."""
