"""What runs on the other side: standard library only, also imported as top-level `inside` in a jail."""
