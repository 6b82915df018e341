"""Collectives over c10d: gloo, nccl, xccl, hccl, tccl, mpi; a backend is available when this torch has it."""

from polyscale_standard.communication.plugins import (
    GlooPlugin,
    HcclPlugin,
    MpiPlugin,
    NcclPlugin,
    TcclPlugin,
    XcclPlugin,
)

__all__ = ["GlooPlugin", "HcclPlugin", "MpiPlugin", "NcclPlugin", "TcclPlugin", "XcclPlugin"]
