"""Stages 1 to 3 on PyTorch's ``fully_shard``.

Read in this order: ``polyscale.parameters.units`` (what is sharded together), ``plugin`` (how it is applied),
``gradients`` (when ranks communicate), ``store`` (whole tensors from shards), ``calls`` (what must not be done
silently).
"""

from polyscale_standard.fsdp2.plugin import Fsdp2Plugin

__all__ = ["Fsdp2Plugin"]
