"""Checks of an op's arguments: references and kernels make the same, so an error does not depend on what is installed.

Notable: raw kernels trust what they are given, so these checks are what keeps a wrong call from writing elsewhere. They
name the argument. Overlap is looked for among contiguous tensors; of others, only the reference makes use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError

if TYPE_CHECKING:
    import torch


def check_adam(
    op: str,
    written: dict[str, torch.Tensor],
    grad: torch.Tensor,
    betas: tuple[float, float],
    step: int,
) -> None:
    """Check the arguments of ``fused_adam_``.

    Args:
        op: its name, for messages.
        written: "param", "exp_avg" and "exp_avg_sq" of one floating dtype, and "copy" where there is one.
        grad: the gradient, of any floating dtype.
        betas: decay rates in [0, 1).
        step: number of this update, from 1 (anything where moments are not corrected).

    Raises:
        PolyscaleError: an argument is wrong; named.
    """
    param = written["param"]
    for name in ("exp_avg", "exp_avg_sq"):
        if written[name].dtype != param.dtype:
            raise PolyscaleError(
                f"{op}: {name} of dtype {written[name].dtype}",
                why=f"param is of dtype {param.dtype}",
                fix="Keep both moments in the dtype of the parameter",
            )
    check_alike(op, {**written, "grad": grad})
    check_apart(op, written, {"grad": grad})
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise PolyscaleError(f"{op}: {name}={beta}", why="it is a decay rate", fix="Give a number in [0, 1)")
    if step < 1:
        raise PolyscaleError(f"{op}: step={step}", why="it is the number of this update", fix="Count from 1")


def check_alike(op: str, tensors: dict[str, torch.Tensor]) -> None:
    """Check that ``tensors`` are of floating dtypes, on one device and of one shape.

    Raises:
        PolyscaleError: one is not; named.
    """
    first_name, first = next(iter(tensors.items()))
    device, shape = first.device, first.shape
    for name, tensor in tensors.items():
        check_floating(op, name, tensor)
        if tensor.device != device:
            raise PolyscaleError(
                f"{op}: {name} on {tensor.device}", why=f"{first_name} is on {device}", fix="Move them to one device"
            )
        if tensor.shape != shape:
            raise PolyscaleError(
                f"{op}: {name} of shape {tuple(tensor.shape)}",
                why=f"{first_name} is of shape {tuple(shape)}",
                fix="Give tensors of one shape",
            )


def check_floating(op: str, name: str, tensor: torch.Tensor) -> None:
    """Check that ``tensor`` is dense and of a real floating dtype.

    Raises:
        PolyscaleError: it is not.
    """
    import torch

    if not tensor.dtype.is_floating_point or tensor.layout != torch.strided:
        raise PolyscaleError(
            f"{op}: {name} of dtype {tensor.dtype} and layout {tensor.layout}",
            why="dense tensors of floating point are expected",
            fix="Convert it",
        )


def check_apart(
    op: str, written: dict[str, torch.Tensor], read: dict[str, torch.Tensor], *, same: bool = False
) -> None:
    """Check that no tensor of ``written`` shares memory with another of ``written`` or ``read``.

    Args:
        op: its name, for messages.
        written: by name.
        read: by name.
        same: two tensors that are the same elements are allowed, which is safe where each is read before it is written.

    Raises:
        PolyscaleError: two share memory; both are named.
    """
    ranges = [(name, *_bytes(tensor)) for name, tensor in (*written.items(), *read.items())]
    for place, (one, start, end) in enumerate(ranges[: len(written)]):
        for other, other_start, other_end in ranges[place + 1 :]:
            if start < other_end and other_start < end and not (same and start == other_start and end == other_end):
                raise PolyscaleError(
                    f"{op}: {one} and {other} share memory",
                    why=f"{one} is written while {other} is in use",
                    fix="Give tensors that do not overlap",
                )


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one behind the last; equal where there are none to compare."""
    if tensor.device.type == "meta" or not tensor.is_contiguous():  # as which torch.compile's tensors come here
        return 0, 0
    size = tensor.nbytes
    start = tensor.data_ptr() if size else 0
    return start, start + size
