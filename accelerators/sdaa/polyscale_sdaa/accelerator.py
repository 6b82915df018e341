"""SdaaAccelerator: ``TorchAccelerator`` over ``torch.sdaa``, which Tecorigin's torch-sdaa registers as PrivateUse1.

Notable: a card is four devices. The package is on no public index, and its releases follow torch's at a distance; one
that is made for another torch is refused by its metadata, before it is imported.
"""

from __future__ import annotations

from polyscale import sdk
from polyscale.device_host import explain_mask
from polyscale.interfaces.accelerator import Capabilities, Finding, Toolchain
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_sdaa import env, host

_DTYPES = frozenset({"fp32", "fp16"})


class SdaaAccelerator(TorchAccelerator):
    """Tecorigin devices."""

    name = "sdaa"
    device_type = "sdaa"
    communications = ("tccl",)
    visible_devices_variable = env.MASK
    modules = ("torch_sdaa",)
    # The first release with documents for a torch that loads it by itself: http://docs.tecorigin.com/release/torch2.7
    requires = ("torch-sdaa>=3.2",)
    install = "install TecoToolKit with torch-sdaa for this torch (http://docs.tecorigin.com/release/torch2.7)"
    private = True
    own_streams = True

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """All but graphs; bf16 only where the device has it."""
        bf16 = self.is_available() and self._module().is_bf16_supported()
        dtypes = _DTYPES | {"bf16"} if bf16 else _DTYPES
        return Capabilities(dtypes, streams=True, pinned_memory=True, memory_statistics=True)

    def absence(self) -> str:
        """Tell apart: hardware without torch-sdaa, no driver, a mask; the rest is told in general."""
        devices = host.physical_devices()
        if sdk.missing_modules(self.modules):
            return f"this host has {devices} SDAA devices, but no torch_sdaa; {self.install}" if devices else ""
        if not devices:
            return (
                "no Tecorigin driver is loaded (no /dev/tcaicard*); if this machine has a card, install TecoDriver, "
                "and start containers with --device /dev/tcaicard0"
            )
        return explain_mask(env.MASK, env.mask(), devices)

    def diagnose(self) -> list[Finding]:
        """Devices, driver, torch-sdaa, compiler."""
        return [*super().diagnose(), *host.findings(self.toolchain())]

    def toolchain(self) -> Toolchain | None:
        """``tecocc``."""
        return host.toolchain()
