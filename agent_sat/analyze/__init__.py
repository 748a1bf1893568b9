"""Reads run directories; never imports torch."""
