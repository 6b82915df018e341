"""Checkpoints: directories that survive a crash, manifests, blobs, and the export of weights.

``directory`` how checkpoints lie and are replaced; ``manifest`` what one holds; ``compare`` whether it belongs to a
model; ``blobs`` plain values in files; ``report`` what a load did; ``export`` safetensors. The tensors themselves are
written by a storage plugin (``polyscale.interfaces.checkpoint``).
"""
