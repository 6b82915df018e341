"""The c10d backends and their plugins.

Notable: which dtype a sum is accumulated in is stated per backend (gloo adds bf16 in bf16: 1 + 2^-8 + 2^-8 gives 1,
not 1.0078125).
"""

from __future__ import annotations

from types import MappingProxyType

from polyscale.hooks import PluginContext, hookimpl
from polyscale_standard.communication.c10d import Backend, C10dCommunication

_INTEGERS = {name: name for name in ("int64", "int32", "int8", "uint8")}
_WIDE = {"fp64": "fp64", "fp32": "fp32"}
# Measured for gloo; for the others from their documentation: each hop rounds to the dtype that is sent.
_NARROW = {"bf16": "bf16", "fp16": "fp16"}

_GLOO = Backend("gloo", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}), host=True)
_NCCL = Backend("nccl", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}))
_XCCL = Backend("xccl", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}))
_HCCL = Backend("hccl", MappingProxyType({"fp32": "fp32", **_NARROW, "int64": "int64", "int32": "int32"}))
_TCCL = Backend("tccl", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}))
_MPI = Backend("mpi", MappingProxyType({**_WIDE, **_INTEGERS}), host=True)


class _C10dPlugin:
    interface_version = (1, 0)
    _backend: Backend

    @hookimpl
    def polyscale_communication(self, context: PluginContext) -> C10dCommunication:
        """Make the collectives of this backend."""
        return C10dCommunication(self._backend)


class GlooPlugin(_C10dPlugin):
    """Hands over gloo: host tensors over TCP."""

    _backend = _GLOO


class NcclPlugin(_C10dPlugin):
    """Hands over nccl."""

    _backend = _NCCL


class XcclPlugin(_C10dPlugin):
    """Hands over xccl."""

    _backend = _XCCL


class HcclPlugin(_C10dPlugin):
    """Hands over hccl."""

    _backend = _HCCL


class TcclPlugin(_C10dPlugin):
    """Hands over tccl."""

    _backend = _TCCL


class MpiPlugin(_C10dPlugin):
    """Hands over mpi."""

    _backend = _MPI
