"""What an accelerator declares, tried out: a capability that is declared must work, or the error names who promised it.

Notable: each capability is tried by its use (a product whose value is known, a tensor that is pinned), not by asking
the plugin again. A training tries the dtype that it computes in, before the model is moved; :func:`broken_claims` tries
everything, for a plugin's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from polyscale.discovery.quiet import describe
from polyscale.errors import PolyscaleError, UnsupportedError

if TYPE_CHECKING:
    from polyscale.interfaces.accelerator import Accelerator

T = TypeVar("T")
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SIDE = 4


def keep_claim(name: str, capability: str, doing: str, call: Callable[[], T]) -> T:
    """Return ``call()``, the use of something that accelerator ``name`` declares.

    Args:
        name: the accelerator's plugin.
        capability: what it declares ("streams").
        doing: what is under way ("making a stream").
        call: the use.

    Raises:
        UnsupportedError: it failed; names the plugin, the capability, and what failed. Errors of polyscale's own pass.
    """
    try:
        return call()
    except (PolyscaleError, MemoryError):
        raise
    except Exception as error:
        if _out_of_memory(error):
            raise
        raise broken_claim(name, capability, f"{doing} failed: {describe(error)}") from error


def broken_claim(name: str, capability: str, failed: str) -> UnsupportedError:
    """The error for a declared capability that does not work."""
    return UnsupportedError(
        f"Accelerator {name!r}",
        why=f"Its plugin declares {capability}, but {failed}",
        fix="Report it to the plugin's authors; another accelerator can be named in backends.accelerator",
    )


def check_dtype(accelerator: Accelerator, dtype: str) -> None:
    """Refuse a compute dtype that the accelerator does not declare, or declares and cannot multiply.

    Args:
        accelerator: activated, with its device set.
        dtype: "fp64", "fp32", "bf16" or "fp16"; others are not judged.

    Raises:
        UnsupportedError: it cannot be used.
    """
    if dtype not in _DTYPES:
        return
    declared = accelerator.capabilities.dtypes
    if dtype not in declared:
        raise UnsupportedError(
            f"Computing in {dtype} on accelerator {accelerator.name!r}",
            why=f"Its plugin declares {_list(declared)}",
            fix="Choose a precision that computes in one of these, for instance "
            + ('"bf16": {"enabled": true}' if "bf16" in declared else "fp32, by setting neither bf16 nor fp16"),
        )
    _try_dtype(accelerator, dtype)


def broken_claims(accelerator: Accelerator) -> list[UnsupportedError]:
    """Try everything that an activated accelerator declares; returns one error per claim that does not hold."""
    claims = accelerator.capabilities
    trials: list[Callable[[Accelerator], None]] = [partial(_try_dtype, name=dtype) for dtype in sorted(claims.dtypes)]
    trials += [_try_streams] if claims.streams else []
    trials += [_try_pinned] if claims.pinned_memory else []
    trials += [_try_memory] if claims.memory_statistics else []
    broken = []
    for trial in trials:
        try:
            trial(accelerator)
        except UnsupportedError as error:
            broken.append(error)
    return broken


def _try_dtype(accelerator: Accelerator, name: str) -> None:
    import torch

    capability = f"the dtype {name}"
    if name not in _DTYPES:
        raise broken_claim(accelerator.name, capability, f"the names of dtypes are {_list(_DTYPES)}")

    def multiply() -> float:
        ones = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, _DTYPES[name]), device=accelerator.device())
        return float((ones @ ones).sum().item())

    got = keep_claim(accelerator.name, capability, "a product of two matrices", multiply)
    if got != float(_SIDE**3):
        wrong = f"a product of two matrices of ones gave {got / _SIDE**2:g} instead of {_SIDE}"
        raise broken_claim(accelerator.name, capability, wrong)


def _try_streams(accelerator: Accelerator) -> None:
    def use() -> None:
        stream, event = accelerator.new_stream(), accelerator.new_event()
        with stream:
            event.record()
        event.synchronize()
        stream.synchronize()

    keep_claim(accelerator.name, "streams", "work on a new stream", use)


def _try_pinned(accelerator: Accelerator) -> None:
    import torch

    pinned = keep_claim(
        accelerator.name, "pinned memory", "pinning host memory", lambda: torch.ones(_SIDE).pin_memory().is_pinned()
    )
    if not pinned:
        raise broken_claim(accelerator.name, "pinned memory", "a pinned tensor says that it is not pinned")


def _try_memory(accelerator: Accelerator) -> None:
    import torch

    size = 1 << 20

    def allocated() -> int:
        return accelerator.memory().allocated

    what, doing = "memory statistics", "asking for them"
    before = keep_claim(accelerator.name, what, doing, allocated)

    def hold() -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=accelerator.device())

    held = keep_claim(accelerator.name, what, f"a tensor of {size} bytes", hold)
    counted = keep_claim(accelerator.name, what, doing, allocated) - before
    if counted < held.numel():
        raise broken_claim(accelerator.name, what, f"a tensor of {size} bytes was counted as {counted} bytes")


def _out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
