"""SimcclCommunication: the collectives of ``polyscale.interfaces.communication`` over simccl.

Notable: torch knows the backend once the simulated device is registered. Before that it counts as available where the
device does, so that the report need not register it.
"""

from __future__ import annotations

from types import MappingProxyType

from polyscale.errors import UnsupportedError
from polyscale_sim.communication import NAME
from polyscale_standard.communication.c10d import Backend, C10dCommunication

# gloo adds; each partial sum is rounded to the dtype of the tensor.
_SUMS = {name: name for name in ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "int8", "uint8")}


class SimcclCommunication(C10dCommunication):
    """Collectives on the simulated device, under whatever name it is registered."""

    def __init__(self) -> None:
        super().__init__(Backend(NAME, MappingProxyType(_SUMS)))

    def why_unavailable(self) -> str:
        """Say what the device lacks; "" where it can be used."""
        import torch.distributed as dist

        if dist.is_available() and not dist.is_backend_available(NAME):
            from polyscale_sim.accelerator import SimAccelerator

            return SimAccelerator().why_unavailable()
        return super().why_unavailable()

    def backend(self, device_type: str) -> str:
        """The string for ``init_process_group``: simccl for the device, gloo for host tensors.

        Raises:
            UnsupportedError: ``device_type`` is not that of the simulated device.
        """
        import torch.distributed as dist

        if not dist.is_backend_available(NAME):
            raise UnsupportedError(
                f"Communication {NAME!r} for device type {device_type!r}",
                why="It moves tensors of the simulated device, which is not registered in this process",
                fix='Set "backends": {"accelerator": "sim"}, or communication to "auto"',
            )
        return super().backend(device_type)
