"""CudaAccelerator: ``TorchAccelerator`` with CUDA's names.

Notable: "no GPU" has four causes that need four remedies, so each is told apart: a torch built without CUDA, a torch
built for ROCm (whose devices call themselves cuda), no driver, and no visible device. bf16 products are declared from
compute capability 8.0 on.
"""

from __future__ import annotations

from polyscale.interfaces.accelerator import Capabilities, Finding, Toolchain
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_cuda import env, host

_DTYPES = frozenset({"fp64", "fp32", "bf16", "fp16"})


class CudaAccelerator(TorchAccelerator):
    """NVIDIA devices."""

    name = "cuda"
    device_type = "cuda"
    communications = ("nccl", "gloo")
    visible_devices_variable = env.MASK
    install = "install a CUDA build of torch (https://pytorch.org/get-started/locally/)"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """All of them; bf16 only where the device has it."""
        import torch

        old = self.is_available() and torch.cuda.get_device_capability() < (8, 0)
        dtypes = _DTYPES - {"bf16"} if old else _DTYPES
        return Capabilities(dtypes, streams=True, graphs=True, pinned_memory=True, memory_statistics=True)

    def is_available(self) -> bool:
        """Return whether torch is built for CUDA, not ROCm, and sees a device."""
        import torch

        return torch.version.hip is None and super().is_available()

    def why_unavailable(self) -> str:
        """Say which of the four causes it is; "" when a device can be used."""
        import torch

        return self.absence() if torch.version.hip is not None else super().why_unavailable()

    def absence(self) -> str:
        """Tell the four causes apart."""
        import torch

        if torch.version.hip is not None:
            return (
                f"this torch ({torch.__version__}) is built for ROCm {torch.version.hip}, whose devices belong to "
                f"accelerator 'rocm'; {self.install}"
            )
        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) is built without CUDA; {self.install}"
        if not host.has_driver():
            return (
                "no NVIDIA driver is loaded; if this machine has an NVIDIA GPU, install it, and start containers with "
                "access to the devices"
            )
        return host.explain_mask(env.mask(), host.physical_devices()) or host.initialisation_error(env.mask())

    def diagnose(self) -> list[Finding]:
        """Devices, driver, CUDA and NCCL of torch, toolkit and compiler."""
        return [*super().diagnose(), *host.findings(self.toolchain())]

    def toolchain(self) -> Toolchain | None:
        """``nvcc`` of ``CUDA_HOME``, of the path, or of the usual place."""
        return host.toolchain(env.toolkit())
