"""ZeRO of polyscale's own: stages 1 to 3 on flat shard units.

Read in this order: ``options`` (what a configuration may say), ``layout`` (where parameters lie in a buffer), ``flat``
(a buffer, its shard and its masters), ``unit`` (what is gathered together), ``planning`` (which parameters share a
buffer), ``plugin`` (how it is applied), ``gradients`` and ``reduction`` (when ranks reduce), ``common`` (memory that
ranks share), ``gathering``, ``nests``, ``order`` and ``agreement`` (stage 3), ``store`` (whole tensors from shards),
``released``, ``epoch`` and ``bindings`` (what must not be done silently).

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; flat parameters of a
unit as in Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3.
"""

from polyscale_zero.plugin import ZeroPlugin

__all__ = ["ZeroPlugin"]
