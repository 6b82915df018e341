"""Names of torch that are private. Nothing else of this package outside ``communication`` uses such a name."""

from __future__ import annotations

from types import ModuleType


def register_device_module(name: str, module: ModuleType) -> None:
    """Make ``module`` ``torch.<name>``."""
    import torch

    torch._register_device_module(name, module)  # type: ignore[no-untyped-call]


def claim(name: str) -> None:
    """Give torch's slot for out-of-tree device types this name; once per process."""
    from torch.utils.backend_registration import rename_privateuse1_backend

    rename_privateuse1_backend(name)


def add_methods() -> None:
    """Give tensors, storages and modules the methods ``<name>()`` and ``is_<name>`` of the slot's name."""
    from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

    generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)


def exchange_device(index: int) -> int:
    """Make a device current, -1: leave it; returns the one before."""
    import torch

    return int(torch._C._accelerator_exchangeDevice(index))


def device_type_number() -> int:
    """The number of the slot for out-of-tree device types, as streams want it."""
    import torch

    return int(torch._C._autograd.DeviceType.PrivateUse1.value)
