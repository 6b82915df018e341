"""Stage 0: every rank holds the whole model; gradients are summed in flat fp32 buckets.

Read in this order: ``plugin`` (what happens when it is applied), ``buckets`` (what happens in a backward), ``store``.
"""

from polyscale_standard.ddp.plugin import DdpPlugin

__all__ = ["DdpPlugin"]
