"""XpuAccelerator: ``TorchAccelerator`` over ``torch.xpu``, which torch has itself.

Notable: fp64 products are declared only where the device has them; "no device" has five causes with five remedies.
"""

from __future__ import annotations

from polyscale.interfaces.accelerator import Capabilities, Finding, Toolchain
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_xpu import env, host

_DTYPES = frozenset({"fp32", "bf16", "fp16"})


class XpuAccelerator(TorchAccelerator):
    """Intel GPUs."""

    name = "xpu"
    device_type = "xpu"
    communications = ("xccl",)
    visible_devices_variable = env.MASK
    install = "install an XPU build of torch (https://pytorch.org/get-started/locally/)"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """All of them; fp64 only where the device has it."""
        import torch

        wide = self.is_available() and torch.xpu.get_device_properties().has_fp64
        dtypes = _DTYPES | {"fp64"} if wide else _DTYPES
        return Capabilities(dtypes, streams=True, graphs=True, pinned_memory=True, memory_statistics=True)

    def absence(self) -> str:
        """Tell apart: another build of torch, no driver, no permission, no Level Zero, a mask."""
        import torch

        if torch.version.xpu is None:
            return f"this torch ({torch.__version__}) is built without XPU; {self.install}"
        nodes = host.nodes()
        if not nodes:
            return (
                "no Intel GPU has a driver (no /dev/dri/renderD* is one's); if this machine has one, install its "
                "driver, and start containers with --device /dev/dri"
            )
        if not host.may_use(nodes):
            return f"this user may not open {nodes[0]}; add it to the group render, and log in again"
        if not host.has_level_zero():
            return "the Level Zero loader (libze_loader.so.1) is missing; install it with the GPU's user-space driver"
        return host.explain_mask(env.mask(), len(nodes))

    def diagnose(self) -> list[Finding]:
        """Devices, driver, Level Zero, XPU of torch, compiler."""
        return [*super().diagnose(), *host.findings(self.toolchain())]

    def toolchain(self) -> Toolchain | None:
        """``icpx`` of ``CMPLR_ROOT`` or ``ONEAPI_ROOT``, of the path, or of the usual place."""
        return host.toolchain(env.compiler_roots())
