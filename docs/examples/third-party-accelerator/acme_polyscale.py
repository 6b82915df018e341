"""Acme devices as a polyscale accelerator.

The device is that of polyscale-backend-sim under the name "acme": an extension of torch in C++ that computes on the
CPU. What a real device brings instead is said in the comments. torch is imported in no line of this file, so that
``scale-report`` can ask on any machine.
"""

from polyscale import ops
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.accelerator import Accelerator, Capabilities
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_sim import device, env


class AcmeAccelerator(TorchAccelerator):
    """Acme devices."""

    name = "acme"
    device_type = "acme"
    private = True  # it takes torch's one slot for out-of-tree devices
    auto = False  # a real device says True, and is then chosen where it is present
    communications: tuple[str, ...] = ("simccl",)  # collectives that serve the device, best first
    visible_devices_variable = env.MASK
    capabilities = Capabilities(
        frozenset({"fp64", "fp32", "bf16", "fp16"}), streams=True, pinned_memory=True, memory_statistics=True
    )

    def why_unavailable(self) -> str:
        """Whether the extension is built or can be (a real device has ``modules`` and asks its driver)."""
        found = ops.status(device.MODULE)
        return f"{found.why}. {found.fix}" if found.state == "cannot build" else env.explain_mask()

    def device_count(self) -> int:
        """Asked before the device is registered (the module of a real device counts)."""
        return env.device_count()

    def activate(self) -> None:
        """Register the device with torch (importing the module of a real device does)."""
        device.register(self.device_type)


class AcmePlugin:
    """What the entry point names."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> Accelerator:
        """Hand the accelerator over."""
        return AcmeAccelerator()
