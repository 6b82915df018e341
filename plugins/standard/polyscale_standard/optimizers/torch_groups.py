"""From named groups to an optimizer of ``torch.optim``, in its fastest form that this device has.

Notable: whether a fused form works for a device and dtype is found by one step on a throw-away element, not from a
table: devices gain fused kernels over time, and vendors' devices are in no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polyscale.errors import UnsupportedError
from polyscale.interfaces.optimizer import OptimizerGroup

if TYPE_CHECKING:
    import torch


def torch_groups(groups: list[OptimizerGroup], options: Callable[[OptimizerGroup], dict[str, Any]]) -> list[Any]:
    """Return torch's parameter groups, with the names of the parameters as ``param_names``.

    Groups without parameters are left out: torch cannot mix groups with and without names. Where all are empty, one
    remains, so that an optimizer of a rank without trained parameters still steps.
    """
    full = [{"params": list(group.params.items()), **options(group)} for group in groups if group.params]
    return full or [{"params": []}]


def make(cls: type[torch.optim.Optimizer], groups: list[Any], kwargs: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make ``cls`` over ``groups``; ``kwargs["fused"]`` None chooses fused where it works, foreach elsewhere.

    Raises:
        UnsupportedError: fused was asked for, and does not work here.
    """
    settings = dict(kwargs)
    asked = settings.pop("fused", None)
    kinds = {(param.device, param.dtype) for group in groups for _, param in group["params"]}
    works = asked is not False and all(_fused_works(cls, *kind) for kind in kinds)
    if asked and not works:
        raise UnsupportedError(
            "optimizer.params.fused=true",
            why=f"torch has no fused {cls.__name__} for {', '.join(sorted(f'{d} {t}' for d, t in kinds))}",
            fix="Leave it out: the foreach form is used where the fused one is missing",
        )
    settings["fused" if works else "foreach"] = True
    return cls(groups, **settings)


def _fused_works(cls: type[torch.optim.Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    import torch

    probe = torch.nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        cls([probe], lr=0.0, fused=True).step()  # type: ignore[call-arg]
    except torch.OutOfMemoryError:  # says nothing about the form
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    return True
