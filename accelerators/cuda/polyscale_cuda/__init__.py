"""NVIDIA CUDA devices as a polyscale accelerator."""
