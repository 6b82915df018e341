"""Registering ops with torch: the schema and its reference once, a kernel for each device type that asks.

Notable: the reference is registered for every device (CompositeExplicitAutograd), a kernel under the device's own key,
so a call finds the kernel where there is one and the reference elsewhere, on the meta device too. Neither is recorded
by autograd.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from polyscale import _torch, env
from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import BuildError, PluginError, PolyscaleError
from polyscale.interfaces.op import Kernel, Op
from polyscale.ops.libraries import Declared, find_op, kernels_for
from polyscale.ops.loading import load_module

logger = logging.getLogger("polyscale")
NAMESPACE = "polyscale"
_EVERY_DEVICE = "CompositeExplicitAutograd"


@dataclass
class _Registered:
    """torch's handle, which unregisters everything when it is freed; and what was asked for."""

    library: Any
    lock: threading.RLock = field(default_factory=threading.RLock)
    ops: set[str] = field(default_factory=set)
    devices: set[tuple[str, str]] = field(default_factory=set)
    keys: set[tuple[str, str]] = field(default_factory=set)


@lru_cache(maxsize=1)
def _registered() -> _Registered:
    import torch

    return _Registered(torch.library.Library(NAMESPACE, "FRAGMENT"))  # type: ignore[no-untyped-call]


def use(name: str, device_type: str) -> Any:
    """Make op ``name`` callable for tensors of ``device_type``; returns ``torch.ops.polyscale.<name>``.

    The first kernel whose module loads is used; it is built now where it has not been built yet. Where none loads, the
    reference runs, and the reason is logged once.

    Args:
        name: an op that an installed library declares.
        device_type: of the tensors; the accelerator must be active where torch does not know it by itself.

    Raises:
        PluginError: no library declares the op, or two do.
    """
    import torch

    registered = _registered()
    with registered.lock:
        if name not in registered.ops:
            _define(registered, find_op(name)[0])
        if (name, device_type) not in registered.devices:
            _attach(registered, name, device_type)
            registered.devices.add((name, device_type))
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _define(registered: _Registered, op: Op) -> None:
    try:
        registered.library.define(f"{op.name}{op.schema}")
    except RuntimeError as error:
        why = f"torch refuses its schema {op.schema!r}: {' '.join(str(error).split())}"
        raise PluginError(f"Op {op.name!r}", why=why) from error
    registered.library.impl(op.name, _without_gradients(op.reference), _EVERY_DEVICE)
    registered.ops.add(op.name)


def _attach(registered: _Registered, name: str, device_type: str) -> None:
    """Register the first kernel that loads, and say why others did not."""
    failures: list[tuple[Declared, Kernel, Exception]] = []
    attached = False
    for kernel, library in kernels_for(name, device_type):
        try:
            implementation, key = _implementation(kernel, library), _torch.dispatch_key(device_type)
        except (PolyscaleError, RuntimeError) as error:
            failures.append((library, kernel, error))
            continue
        if (name, key) not in registered.keys:  # two device types of one vendor may share a key
            registered.library.impl(name, _without_gradients(implementation), key)
            registered.keys.add((name, key))
        attached = True
        break
    for library, kernel, failure in failures:
        level = logging.WARNING if env.launch().rank == 0 else logging.INFO
        _say_once(level, str(failure) if attached else f"{failure} {_references_run(library, kernel, failure)}")


def _without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels write past autograd; a reference, or what a kernel leaves to it, must not differ from them in that."""
    import torch

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return called


def _implementation(kernel: Kernel, library: Declared) -> Callable[..., Any]:
    extension = load_module(library.module_of(kernel))
    doing = f"Taking the kernel of {kernel.op} from {kernel.module}"
    return run_plugin_code(library.entry.label, doing, lambda: kernel.implementation(extension), fix="")


def _references_run(library: Declared, kernel: Kernel, error: Exception) -> str:
    """What a failure means; in the same words for all ops of a module that fails, so that it is said once."""
    names = [kernel.op]
    if isinstance(error, BuildError):
        mates = (each for each in library.kernels if each.module == kernel.module)
        names = sorted({each.op for each in mates if each.device_type == kernel.device_type})
    run = "op runs its PyTorch reference" if len(names) == 1 else "ops run their PyTorch references"
    return f"On {kernel.device_type} the {run}: {', '.join(names)}"


@lru_cache(maxsize=256)
def _say_once(level: int, message: str) -> None:
    logger.log(level, "%s", message)
