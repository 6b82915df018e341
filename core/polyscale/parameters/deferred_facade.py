"""What Python code sees of a deferred tensor while a model is built.

Notable: torch's own initialisers skip a tensor whose ``is_meta`` is true, and code asks a parameter for its device to
make more tensors there. So a deferred tensor says that it is on cpu, and gives numbers where numbers are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from polyscale.parameters.deferred_log import history_of, leaves, map_leaves
from polyscale.parameters.deferred_replay import real_value

_META = torch.device("meta")


_DEVICE = torch.Tensor.device.__get__
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_PLACE = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.type_as)
_NUMBERS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_HANDLED = frozenset((_DEVICE, _IS_META, _IS_CPU, _SET_DATA, *_PLACE, *_NUMBERS))


class Facade(TorchFunctionMode):
    """Answers for deferred tensors.

    Args:
        virtual: makes a deferred tensor with the values of a real one.
        see: is given each Parameter that passes; making one is no operator, but registering it asks for its
            ``grad_fn``.
    """

    def __init__(self, virtual: Callable[[torch.Tensor], torch.Tensor], see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._virtual = virtual
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is is_recording:
            return True
        for leaf in args:
            if isinstance(leaf, nn.Parameter):
                self._see(leaf)
        if func in _HANDLED and any(history_of(leaf) is not None for leaf in leaves((args, kwargs))):
            return self._handle(func, args, kwargs)
        return func(*args, **kwargs)

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == _DEVICE:
            return torch.device("cpu")
        if func in (_IS_META, _IS_CPU):
            return func == _IS_CPU
        if func == _SET_DATA:
            return self._set_data(*args)
        if func in _PLACE:
            return _placed(func, args, kwargs)
        return func(real_value(args[0]), *args[1:], **kwargs)

    def _set_data(self, tensor: torch.Tensor, value: torch.Tensor) -> Any:
        """``tensor.data = value`` where torch wants both real or both on meta."""
        if history_of(tensor) is None:
            return _SET_DATA(tensor, real_value(value))
        if history_of(value) is None and value.device.type == "cpu":
            value = self._virtual(value)
        return _SET_DATA(tensor, value)


def is_recording(probe: torch.Tensor | None = None) -> bool:
    """Whether this thread records: asked of the function modes themselves, so that no flag has to be kept."""
    probe = torch.ops.aten.empty.memory_format([0], device=_META) if probe is None else probe
    if has_torch_function((probe,)):
        return bool(handle_torch_function(is_recording, (probe,), probe))
    return False


def _placed(func: Any, args: Any, kwargs: Any) -> Any:
    """``to``, ``cpu`` and ``type_as`` keep a deferred tensor where it is, and take from one its dtype only."""
    home = torch.device("cpu") if history_of(args[0]) is None else _META
    if func is torch.Tensor.cpu:
        return torch.Tensor.to(args[0], _META)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, (str, torch.device)):
            return home if is_cpu(leaf) else leaf
        return leaf

    arguments = dict(kwargs)
    other = arguments.pop("other", None)
    rest = [moved(leaf) for leaf in args[1:]]
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    arguments = map_leaves(arguments, moved)
    if other is not None:
        arguments.update(dtype=other.dtype, device=home if _is_home(other) else other.device)
        names = ("non_blocking", "copy")
        arguments.update(zip(names, rest, strict=False))
        rest = []
    return torch.Tensor.to(args[0], *rest, **arguments)


def _is_home(tensor: torch.Tensor) -> bool:
    return history_of(tensor) is not None or tensor.device.type == "cpu"


def is_cpu(device: Any) -> bool:
    """Whether a ``device`` argument, given or left out, means cpu."""
    return device is None or torch.device(device).type == "cpu"
