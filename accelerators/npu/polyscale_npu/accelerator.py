"""NpuAccelerator: ``TorchAccelerator`` over ``torch.npu``, which the package torch-npu registers as PrivateUse1.

Notable: torch loads torch-npu by itself (entry point group ``torch.backends``), and with it CANN's libraries, so what
is missing shows at ``import torch``; the reasons here are for what got past it. bf16 is declared where the chip has it.
"""

from __future__ import annotations

from polyscale import sdk
from polyscale.interfaces.accelerator import Capabilities, Finding, Toolchain
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_npu import env, host

_DTYPES = frozenset({"fp32", "fp16"})


class NpuAccelerator(TorchAccelerator):
    """Huawei Ascend NPUs."""

    name = "npu"
    device_type = "npu"
    communications = ("hccl",)
    visible_devices_variable = env.MASK
    modules = ("torch_npu",)
    # torch-npu follows torch's versions, and polyscale needs torch 2.11.
    requires = ("torch-npu>=2.11",)
    install = "pip install torch-npu, of torch's own version, beside CANN"
    private = True
    own_streams = True

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """All of them; bf16 only where the chip has it."""
        bf16 = self.is_available() and self._module().is_bf16_supported()
        dtypes = _DTYPES | {"bf16"} if bf16 else _DTYPES
        return Capabilities(dtypes, streams=True, graphs=True, pinned_memory=True, memory_statistics=True)

    def absence(self) -> str:
        """Tell apart: hardware without torch-npu, no driver, no CANN, a mask; the rest is told in general."""
        devices = host.physical_devices()
        if sdk.missing_modules(self.modules):
            return f"this host has {devices} NPUs, but torch_npu is not installed; {self.install}" if devices else ""
        if not host.has_driver():
            return (
                "no Ascend driver is loaded (/dev/davinci_manager is absent); if this machine has an NPU, install "
                "driver and firmware, and start containers with its device files"
            )
        if env.toolkit() is None:
            return "CANN's environment is not set (ASCEND_HOME_PATH); run `source set_env.sh` in CANN's folder"
        return host.explain_mask(env.mask(), devices)

    def diagnose(self) -> list[Finding]:
        """Devices, driver, CANN, torch-npu, compiler."""
        return [*super().diagnose(), *host.findings(env.toolkit(), self.toolchain())]

    def toolchain(self) -> Toolchain | None:
        """The BiSheng compiler of CANN."""
        return host.toolchain(env.toolkit())
