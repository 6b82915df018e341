"""The CPU as a polyscale accelerator."""
