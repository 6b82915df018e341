"""RocmAccelerator: ``TorchAccelerator`` over ``torch.cuda``, which a ROCm build of torch serves under the same name.

Notable: ``torch.version.hip`` tells the two builds apart; in a build for CUDA this accelerator is absent, and the one
for CUDA in this build. Device type ("cuda") and collectives ("nccl", which is RCCL here) keep torch's names.
"""

from __future__ import annotations

from polyscale.interfaces.accelerator import Capabilities, Finding, Toolchain
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_rocm import env, host


class RocmAccelerator(TorchAccelerator):
    """AMD devices."""

    name = "rocm"
    device_type = "cuda"
    communications = ("nccl", "gloo")
    visible_devices_variable = env.HIP
    capabilities = Capabilities(
        frozenset({"fp64", "fp32", "bf16", "fp16"}),
        streams=True,
        graphs=True,
        pinned_memory=True,
        memory_statistics=True,
    )
    install = "install a ROCm build of torch (https://pytorch.org/get-started/locally/)"

    def is_available(self) -> bool:
        """Return whether torch is built for ROCm and sees a device."""
        return self.why_unavailable() == ""

    def why_unavailable(self) -> str:
        """Say which cause it is; "" when a device can be used."""
        import torch

        return self.absence() if torch.version.hip is None else super().why_unavailable()

    def device_count(self) -> int:
        """Number of visible devices; 0 where ``torch.cuda`` means the devices of CUDA."""
        import torch

        return 0 if torch.version.hip is None else super().device_count()

    def absence(self) -> str:
        """Tell apart: another build of torch, no driver, no permission, a mask, an error of HIP."""
        import torch

        if torch.version.hip is None:
            if torch.version.cuda is None:
                return f"this torch ({torch.__version__}) is built without ROCm; {self.install}"
            return (
                f"this torch ({torch.__version__}) is built for CUDA {torch.version.cuda}, whose devices belong to "
                f"accelerator 'cuda'; {self.install}"
            )
        if not host.has_driver():
            return (
                "no AMD driver is loaded (/dev/kfd is absent); if this machine has an AMD GPU, install amdgpu, and "
                "start containers with --device /dev/kfd --device /dev/dri"
            )
        if not host.may_use_driver():
            return "this user may not open /dev/kfd; add it to the groups render and video, and log in again"
        masks = env.masks()
        return host.explain_masks(masks, host.physical_devices()) or host.initialisation_error(masks)

    def diagnose(self) -> list[Finding]:
        """Devices, driver, ROCm and RCCL of torch, compiler."""
        return [*super().diagnose(), *host.findings(self.toolchain())]

    def toolchain(self) -> Toolchain | None:
        """``hipcc`` of ``ROCM_HOME`` or ``ROCM_PATH``, of the path, or of the usual place."""
        return host.toolchain(env.toolkit())
