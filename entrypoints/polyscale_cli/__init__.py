"""The polyscale command line."""
