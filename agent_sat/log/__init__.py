"""What a run leaves on disk and shows while it works."""
