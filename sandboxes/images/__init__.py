"""How the image of the Docker backend is made."""
