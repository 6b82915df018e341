"""Ops: operators with a PyTorch reference, and kernels that are compiled in seconds when they are first needed.

Notable: nothing is built at import or at start-up, and without a compiler everything works on the references. Importing
this package imports no torch.

Read ``registry`` for how an op becomes callable, ``loading`` for where its kernel comes from, ``building`` for how that
is built, ``cache`` and ``recipe`` for when a build is used again.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "ModuleStatus": "polyscale.ops.states",
    "load_module": "polyscale.ops.loading",
    "modules": "polyscale.ops.libraries",
    "status": "polyscale.ops.states",
    "use": "polyscale.ops.registry",
}

__all__ = sorted(_LAZY)

if TYPE_CHECKING:
    from polyscale.ops.libraries import modules as modules
    from polyscale.ops.loading import load_module as load_module
    from polyscale.ops.registry import use as use
    from polyscale.ops.states import ModuleStatus as ModuleStatus
    from polyscale.ops.states import status as status


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polyscale.ops' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
