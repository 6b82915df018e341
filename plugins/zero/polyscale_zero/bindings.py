"""Whether the modules still hold the parameters that the flat buffers belong to.

Notable: a parameter that was replaced, or whose ``.data`` was, is outside its buffer: it would be trained by nobody, or
others would be given values that nobody computes with. Nothing in torch tells of it, so identities and memory are
compared at every forward: a look at each module and parameter, which does not touch the device. What is freed (stage 3)
refuses to be given other memory by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyscale._torch import in_backward
from polyscale.errors import UnsupportedError
from polyscale.interfaces.parallelism import Part
from polyscale_zero import _torch
from polyscale_zero.flat import Flat

_FIX = (
    "Change values with engine.parameters_store.set_full(name, value) or gathered([name], modify=True); for another "
    "parameter make a new engine"
)


@dataclass(frozen=True)
class _Holder:
    """A module, its name, and what it held: parameters and children by attribute (None: nothing)."""

    name: str
    module: nn.Module
    held: dict[str, nn.Parameter | None]
    children: dict[str, nn.Module | None]


class Bindings:
    """Compares what modules hold with what they held when it was made.

    Args:
        parts: the model.
        flats: the buffers of its parameters.
        gathering: whether ``gathered`` has put whole copies into the modules.
    """

    def __init__(self, parts: list[Part], flats: Sequence[Flat], gathering: Callable[[], bool]) -> None:
        self._parts, self._gathering = parts, gathering
        named = [(fqn, parameter) for flat in flats for fqn, parameter in flat.parameters.items()]
        self._known = {id(parameter) for _, parameter in named}
        self._shapes = [(fqn, _torch.inner(p), _torch.inner(p).shape) for fqn, p in named]
        resident = {fqn for flat in flats if flat.kind.resident for fqn in flat.parameters}
        self._addresses = [(fqn, inner, inner.data_ptr()) for fqn, inner, _ in self._shapes if fqn in resident]
        self._holders = self._list()
        self._handles: list[Any] = [
            part.module.register_forward_pre_hook(_torch.not_compiled(self._look), prepend=True) for part in parts
        ]

    def check(self) -> None:
        """Compare.

        Raises:
            UnsupportedError: a parameter was replaced, moved, removed or added.
        """
        grown = False
        for holder in self._holders:
            current = holder.module._parameters
            for attribute, parameter in holder.held.items():
                if current.get(attribute) is not parameter:
                    _refuse(_join(holder.name, attribute), parameter, current.get(attribute))
            grown = grown or len(current) != len(holder.held) or holder.module._modules != holder.children
        for fqn, inner, shape in self._shapes:
            if inner.shape != shape:
                raise _moved(fqn, f"its shape was {tuple(shape)} and is {tuple(inner.shape)}")
        for fqn, inner, address in self._addresses:
            if inner.data_ptr() != address:
                raise _moved(fqn, "it no longer lies in the buffer that is trained and sent to other ranks")
        if grown:
            self._look_for_new()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self, _module: nn.Module, _inputs: Any) -> None:
        if not in_backward() and not self._gathering():
            self.check()

    def _list(self) -> list[_Holder]:
        return [_Holder(name, m, dict(m._parameters), dict(m._modules)) for name, m in self._walk()]

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self._parts:
            yield from part.named_modules()

    def _look_for_new(self) -> None:
        """Modules or names have come or gone: refuse parameters that were not there, and take the rest as it is."""
        for name, module in self._walk():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self._known:
                    _refuse(_join(name, attribute), None, parameter)
        self._holders = self._list()


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _refuse(fqn: str, before: nn.Parameter | None, now: object) -> None:
    """Refuse a parameter in a module's place that had another one, or none; not the tensors of functional calls."""
    if now is not None and not isinstance(now, nn.Parameter):
        return
    if before is None:
        raise UnsupportedError(
            f"The parameter {fqn!r} was added after polyscale.initialize",
            why="gradients and optimizer were laid out without it, so it would never train",
            fix="Add it before, or make a new engine and load a checkpoint into it",
        )
    how = "removed" if now is None else "replaced"
    raise UnsupportedError(
        f"The parameter {fqn!r} was {how} after polyscale.initialize",
        why="the engine trains, saves and sends the one that was there",
        fix=_FIX,
    )


def _moved(fqn: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"The memory of the parameter {fqn!r} was replaced after polyscale.initialize", why=why, fix=_FIX
    )
