"""How far a set of tensors is from an oracle, in two measures, and assertions that name every tensor that is too far.

Notable: where rounding is amplified (a sign, a division by a small second moment), no fixed tolerance is right. The
measure there is a float64 run: a run may be a few times as far from it as one process of the same dtype is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Named = Mapping[str, Tensor]

TIMES = 4.0


def assert_close_to_oracle(actual: Named, oracle: Named, *, within: float = 0.0, of_maximum: float = 0.0) -> None:
    """Assert that each element is within ``within`` + ``of_maximum`` * (the tensor's largest magnitude) of the oracle.

    Args:
        actual: name -> tensor.
        oracle: the same names, shapes and dtypes.
        within: absolute part of the tolerance; both parts 0 asks for equal values.
        of_maximum: relative part.

    Raises:
        AssertionError: lists every tensor that is too far, or of another name, shape or dtype.
    """
    _raise_all([*unlike(actual, oracle), *elements_off(actual, oracle, within=within, of_maximum=of_maximum)])


def assert_no_farther(actual: Named, one_process: Named, exact: Named, *, times: float = TIMES) -> None:
    """Assert that ``actual`` is at most ``times`` as far from ``exact`` (float64) as ``one_process`` is.

    Distances are root mean squares, of each tensor and of all together. A tensor that one process happens to get right
    is allowed the distance of all together, or one unit in the last place of its dtype.

    Raises:
        AssertionError: lists every tensor that is too far, or of another name, shape or dtype.
    """
    _raise_all([*unlike(actual, one_process), *tensors_off(actual, one_process, exact, times=times)])


def unlike(actual: Named, oracle: Named) -> Iterable[str]:
    """Yield a sentence for each name, shape or dtype that differs."""
    if actual.keys() != oracle.keys():
        yield f"names of tensors differ: {sorted(actual.keys() ^ oracle.keys())}"
    for name in actual.keys() & oracle.keys():
        found, right = actual[name], oracle[name]
        if (found.dtype, found.shape) != (right.dtype, right.shape):
            yield f"{name} is {found.dtype} {tuple(found.shape)}, not {right.dtype} {tuple(right.shape)}"


def elements_off(actual: Named, oracle: Named, *, within: float = 0.0, of_maximum: float = 0.0) -> Iterable[str]:
    """Yield a sentence for each tensor with an element that is too far. Names and shapes that differ are left out."""
    for name, value in _comparable(actual, oracle):
        error = (value - oracle[name]).abs().max().item()
        limit = within + of_maximum * oracle[name].abs().max().item()
        if not error <= limit:
            yield f"{name} is off by {error:.3g}, allowed {limit:.3g}"


def tensors_off(
    actual: Named, one_process: Named, exact: Named, *, times: float = TIMES, least: float | None = None
) -> Iterable[str]:
    """Yield a sentence for each tensor that is too far, and for all together.

    ``least`` replaces the distance of all together as what every tensor is allowed at least.
    """
    import torch

    names = [name for name, _ in _comparable(actual, one_process)]
    errors = {name: actual[name].double() - exact[name] for name in names}
    references = {name: one_process[name].double() - exact[name] for name in names}
    whole = rms(references.values())
    if not rms(errors.values()) <= times * whole:
        yield f"all tensors together are off by {rms(errors.values()):.3g}, allowed {times * whole:.3g}"
    for name in names:
        last_place = torch.finfo(one_process[name].dtype).eps * rms([exact[name]])
        limit = times * max(rms([references[name]]), whole if least is None else least, last_place)
        error = rms([errors[name]])
        if not error <= limit:
            yield f"{name} is off by {error:.3g}, allowed {limit:.3g}"


def rms(tensors: Iterable[Tensor]) -> float:
    """Root mean square of all elements; 0.0 without any."""
    import torch

    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.double().flatten() for tensor in tensors)])
    return float(flat.square().mean().sqrt()) if flat.numel() else 0.0


def _comparable(actual: Named, oracle: Named) -> Iterable[tuple[str, Tensor]]:
    for name, value in actual.items():
        if name in oracle and oracle[name].shape == value.shape and value.numel():
            yield name, value


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise AssertionError("\n".join(problems))
