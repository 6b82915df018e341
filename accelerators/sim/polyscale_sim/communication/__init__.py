"""simccl: collectives of the simulated device, a c10d backend that really moves and adds bytes.

Read in this order: ``group`` (the c10d interface), ``calls`` (what each collective does on the host), ``queue`` (the
communication stream), ``signature`` (ranks compare what they call before a byte moves), ``work`` (what callers wait
for), ``plugin`` (the polyscale communication plugin). Importing this package imports no torch.
"""

from __future__ import annotations

NAME = "simccl"


def register(device_type: str) -> None:
    """Make ``simccl`` the c10d backend of ``device_type``, the name that the simulated device was registered under."""
    from polyscale_sim.communication.group import register_backend

    register_backend(device_type)
