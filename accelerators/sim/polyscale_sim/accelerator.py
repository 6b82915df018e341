"""SimAccelerator: ``TorchAccelerator`` over the simulated device.

Notable: it is available where its extension is built or can be, which is asked without building anything; the first
``activate`` builds it. ``auto`` never chooses it.
"""

from __future__ import annotations

from polyscale.errors import PolyscaleError
from polyscale.interfaces.accelerator import Capabilities, Finding
from polyscale.torch_accelerator import TorchAccelerator
from polyscale_sim import env


class SimAccelerator(TorchAccelerator):
    """Simulated devices: CPU results, a device's memory, streams and faults."""

    name = "sim"
    device_type = "sim"
    auto = False
    private = True
    communications = ("simccl",)
    visible_devices_variable = env.MASK
    capabilities = Capabilities(
        frozenset({"fp64", "fp32", "bf16", "fp16"}), streams=True, pinned_memory=True, memory_statistics=True
    )

    def why_unavailable(self) -> str:
        """Say what is missing to build the extension, or which setting leaves no device; "" when neither."""
        from polyscale import _torch, ops
        from polyscale_sim.device import MODULE, registered_name

        try:
            if registered_name() == self.device_type:
                return ""
            owner = _torch.privateuse1_owner()
            if owner is not None:
                return f"torch has one slot for out-of-tree devices, and {owner!r} owns it in this process"
            if why := env.explain_mask():
                return why
            env.faults()  # raises where a setting cannot be read
            env.memory_limit()
            state = ops.status(MODULE)
        except PolyscaleError as error:
            return str(error)
        if state.state != "cannot build":
            return ""
        return f"its extension cannot be built: {state.why.rstrip('.')}" + (f"; {state.fix}" if state.fix else "")

    def activate(self) -> None:
        """Build or load the extension and register the device with torch.

        Raises:
            UnsupportedError: another device type owns torch's slot, or the environment leaves no device.
            BuildError: the extension cannot be built.
        """
        from polyscale_sim import device

        self._check_private_owner()
        device.register(self.device_type)

    def device_count(self) -> int:
        """Number of visible devices, registered or not."""
        return super().device_count() if self._find_module() is not None else env.device_count()

    def diagnose(self) -> list[Finding]:
        """Devices, and whether the extension has been built."""
        from polyscale import ops
        from polyscale_sim.device import MODULE

        state = ops.status(MODULE)
        built = Finding("extension", state.state, ok=state.state != "cannot build", fix=state.fix)
        if why := self.why_unavailable():
            return [Finding("devices", "none", ok=False, fix=why), built]
        count = self.device_count()
        return [Finding("devices", f"{count} simulated, {env.memory_limit() / 2**30:.4g} GiB each"), built]
