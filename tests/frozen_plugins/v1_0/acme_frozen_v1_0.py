"""Four small plugins as somebody wrote them for interface 1.0. Never change this file: it stands for their copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polyscale.errors import ConfigError, PolyscaleError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.accelerator import Capabilities, Finding, MemoryUse, Toolchain
from polyscale.interfaces.observer import EngineClosed, EngineStarted, Event, StepTaken
from polyscale.interfaces.optimizer import OptimizerGroup


class Device:
    """An accelerator that computes on the CPU and counts nothing."""

    name = "frozen-device"
    device_type = "cpu"
    auto = False
    communications = ("gloo",)
    visible_devices_variable = ""
    capabilities = Capabilities(dtypes=frozenset({"fp32"}))

    def __init__(self) -> None:
        self.activated = 0

    def is_available(self) -> bool:
        return True

    def why_unavailable(self) -> str:
        return ""

    def activate(self) -> None:
        self.activated += 1

    def device_count(self) -> int:
        return 1

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryUse:
        return MemoryUse(allocated=1, reserved=2, peak=3, total=4)

    def reset_peak_memory(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def new_stream(self) -> Any:
        return Nothing()

    def new_event(self) -> Any:
        return Nothing()

    def diagnose(self) -> list[Finding]:
        return [Finding("cable", "plugged in")]

    def toolchain(self) -> Toolchain | None:
        return None


class Nothing:
    """A stream and an event that do nothing."""

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class DevicePlugin:
    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> Device:
        return Device()


class PlainSgd(torch.optim.Optimizer):
    """p -= lr * grad."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


class SgdFactory:
    """Makes :class:`PlainSgd`."""

    name = "frozen-sgd"
    granularity = "element"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        unknown = set(params) - {"lr"}
        if unknown:
            raise ConfigError(f"optimizer.params.{unknown.pop()}", why="unknown", fix="Valid: lr")
        return {"lr": 0.1, **params}

    def build(self, groups: list[OptimizerGroup], params: dict[str, Any], store: Any) -> torch.optim.Optimizer:
        return PlainSgd([{"params": list(group.params.values()), **group.options} for group in groups], params["lr"])


class SgdPlugin:
    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> SgdFactory:
        return SgdFactory()


class Lines:
    """Appends one line per event to the file named by the option ``path``."""

    name = "frozen-lines"

    def __init__(self, path: str | None) -> None:
        self.path = path

    def enabled(self) -> bool:
        return self.path is not None

    def on_event(self, event: Event) -> None:
        if isinstance(event, EngineStarted):
            line = f"started {event.world_size} {event.stage} {event.parameters}"
        elif isinstance(event, StepTaken):
            line = f"step {event.step} {event.skipped}"
        elif isinstance(event, EngineClosed):
            line = f"closed {event.step}"
        else:
            line = type(event).__name__
        with Path(self.path or "").open("a") as file:
            file.write(line + "\n")

    def close(self) -> None:
        pass


class LinesPlugin:
    interface_version = (1, 0)

    @hookimpl
    def polyscale_observer(self, context: PluginContext) -> Lines:
        return Lines(context.options.get("path"))


class Done:
    """The work of an operation that blocked."""

    def __init__(self, moved: int) -> None:
        self.moved = moved

    def wait(self) -> int:
        return self.moved


class File:
    """Blocking reads and writes."""

    name = "frozen-file"

    def __init__(self) -> None:
        self.pending = 0

    def is_available(self) -> bool:
        return True

    def why_unavailable(self) -> str:
        return ""

    def read(self, tensor: torch.Tensor, path: Any, offset: int = 0) -> int:
        with Path(path).open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(tensor.nbytes))
        if len(data) < tensor.nbytes:
            raise PolyscaleError(f"read of {path}", why=f"{len(data)} of {tensor.nbytes} bytes are there")
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return len(data)

    def write(self, tensor: torch.Tensor, path: Any, offset: int = 0) -> int:
        Path(path).touch()
        with Path(path).open("r+b") as file:
            file.seek(offset)
            return file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def read_async(self, tensor: torch.Tensor, path: Any, offset: int = 0) -> Done:
        self.pending += 1
        return Done(self.read(tensor, path, offset))

    def write_async(self, tensor: torch.Tensor, path: Any, offset: int = 0) -> Done:
        self.pending += 1
        return Done(self.write(tensor, path, offset))

    def wait(self) -> int:
        ended, self.pending = self.pending, 0
        return ended

    def close(self) -> None:
        pass


class FilePlugin:
    interface_version = (1, 0)

    @hookimpl
    def polyscale_io(self, context: PluginContext) -> File:
        return File()
