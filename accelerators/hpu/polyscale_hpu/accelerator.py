"""HpuAccelerator: ``TorchAccelerator`` over ``torch.hpu``, a device type of torch whose module Gaudi's plugin brings.

Notable: a process has one device, whatever its index, so random state is asked for without one. What is not declared:
graphs, which exist in the plugin's lazy mode only, and pinned memory, which it pins by a device argument that torch is
giving up (https://docs.habana.ai/en/latest/PyTorch/Reference/PyTorch_Support_Matrix.html).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale import sdk
from polyscale.interfaces.accelerator import Capabilities, Finding
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_hpu import env, host

if TYPE_CHECKING:
    import torch

_DTYPES = frozenset({"fp32", "bf16"})
_FIRST_GENERATION = "GAUDI"  # what the plugin calls it; it multiplies no fp16


class HpuAccelerator(TorchAccelerator):
    """Intel Gaudi devices."""

    name = "hpu"
    device_type = "hpu"
    communications = ("hccl",)
    visible_devices_variable = env.MASK
    modules = ("habana_frameworks.torch",)
    # The first that torch loads by itself: https://docs.habana.ai/en/latest/PyTorch/Python_Packages.html
    requires = ("habana-torch-plugin>=1.18",)
    install = "install Gaudi's software (https://docs.habana.ai/en/latest/Installation_Guide/index.html)"
    own_streams = True

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Streams and memory statistics; fp16 from the second generation on."""
        first = not self.is_available() or self._device_name(0) == _FIRST_GENERATION
        dtypes = _DTYPES if first else _DTYPES | {"fp16"}
        return Capabilities(dtypes, streams=True, memory_statistics=True)

    def absence(self) -> str:
        """Tell apart: hardware without the plugin, no driver, a mask; the rest is told in general."""
        ids = host.module_ids()
        if sdk.missing_modules(self.modules):
            return f"this host has {len(ids)} Gaudi devices, but no plugin for torch; {self.install}" if ids else ""
        if not host.has_driver():
            return (
                "the driver habanalabs is not loaded; if this machine has Gaudi devices, install it, and start "
                "containers with --runtime=habana"
            )
        return host.explain_mask(env.mask(), ids)

    def rng_state(self) -> torch.Tensor:
        """State of the one device's generator (uint8, on the host)."""
        state: torch.Tensor = self._module().get_rng_state()
        return state.cpu()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""
        self._module().set_rng_state(state.cpu())

    def diagnose(self) -> list[Finding]:
        """Devices, driver, plugin."""
        return [*super().diagnose(), *host.findings()]
