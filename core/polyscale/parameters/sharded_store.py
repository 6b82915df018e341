"""The generic half of a ParameterStore: whole tensors from parts, temporary whole parameters, tied names.

A data-parallel plugin subclasses it and says four things about a parameter: its master's local memory, how parts make
a whole, how a whole is cut, and how a changed master reaches the module.

Notable: ``gathered`` puts clones into the modules, never the parameters themselves, so a forbidden write cannot damage
training: it is found by a checksum and raised, at every stage alike.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyscale.errors import PolyscaleError, nearest
from polyscale.interfaces.checkpoint import Box
from polyscale.interfaces.optimizer import Granularity
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.names import public_name
from polyscale.parameters.norms import sums_of_squares


class ShardedStore(ABC):
    """Base class of parameter stores. See ``polyscale.parameters.store.ParameterStore`` for the contract."""

    flat = False

    def __init__(self, parts: list[Part], infos: dict[str, ParamInfo], context: ParallelContext) -> None:
        self.infos: Mapping[str, ParamInfo] = infos
        self._topology, self._communication = context.topology, context.communication
        wide = "fp64" in context.accelerator.capabilities.dtypes
        self._device, self._wide = context.device, torch.float64 if wide else torch.float32
        self._canonical = {name: info.fqn for info in infos.values() for name in info.names}
        self._places = _places(parts)
        self._optimizer: torch.optim.Optimizer | None = None
        self.granularity: Granularity = "element"
        self.gathering = 0
        self.before_gradients: Callable[[], None] = lambda: None

    # What a plugin says.

    @abstractmethod
    def optimizer_parameter(self, fqn: str, granularity: Granularity) -> nn.Parameter:
        """See the Protocol."""

    @abstractmethod
    def assemble(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""

    @abstractmethod
    def extract(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""

    @abstractmethod
    def fragments(self, fqn: str, local: torch.Tensor) -> tuple[Box, ...]:
        """See the Protocol."""

    @abstractmethod
    def written(self, names: Iterable[str] | None = None) -> None:
        """See the Protocol."""

    # What follows from it.

    def canonical(self, name: str | nn.Parameter) -> str:
        """Return the canonical name of a parameter given by any of its names, or by the object in the module."""
        if isinstance(name, str):
            if name in self._canonical:
                return self._canonical[name]
            hint = nearest(name, self._canonical)
            raise PolyscaleError(
                f"No parameter {name!r}",
                why="the model has no parameter of that name",
                fix=f"Did you mean {hint!r}?" if hint else "List the names with engine.parameters_store.infos",
            )
        for fqn, places in self._places.items():
            module, attribute = places[0]
            if module._parameters.get(attribute) is name or self.optimizer_parameter(fqn, "tensor") is name:
                return self._canonical[fqn]
        raise PolyscaleError(
            f"A parameter of shape {tuple(name.shape)}",
            why="it is not a parameter of this engine's model (sharding replaces parameter objects)",
            fix="Take it from the module after polyscale.initialize, or give its name",
        )

    def refuse_unfrozen(self) -> None:
        """Raise when a parameter that was frozen at the start has been unfrozen since.

        Raises:
            PolyscaleError: it has no gradient buffer and is in no optimizer group, so it would never train.
        """
        for fqn, info in self.infos.items():
            if info.requires_grad:
                continue
            module, attribute = self._places[fqn][0]
            parameter = module._parameters.get(attribute)
            if parameter is not None and parameter.requires_grad:
                raise PolyscaleError(
                    f"The parameter {fqn!r} was unfrozen after polyscale.initialize",
                    why="gradients and optimizer were laid out without it, so it would never train",
                    fix="Leave it trainable when the engine is made and freeze it afterwards, or make a new engine and "
                    "load a checkpoint into it",
                )

    def attach(self, optimizer: torch.optim.Optimizer, granularity: Granularity) -> None:
        """Tell the store which optimizer holds the states, and at which granularity it was given parameters."""
        self._optimizer = optimizer
        self.granularity = granularity

    def state_names(self, fqn: str) -> tuple[str, ...]:
        """Names of the optimizer states of a parameter (empty before its first update)."""
        return tuple(self._state(self.canonical(fqn)))

    def local(self, fqn: str, kind: str = "parameter") -> torch.Tensor | None:
        """See the Protocol."""
        fqn = self.canonical(fqn)
        parameter = self.optimizer_parameter(fqn, "element")
        if kind == "parameter":
            return parameter.detach()
        if kind == "gradient":
            return parameter.grad
        state = self._state(fqn).get(kind)
        return local_tensor(state) if isinstance(state, torch.Tensor) else None

    def get_full(self, fqn: str, kind: str = "parameter") -> torch.Tensor | None:
        """See the Protocol."""
        fqn = self.canonical(fqn)
        if kind == "gradient":
            self.before_gradients()
        local = self.local(fqn, kind)
        if local is None:
            return None
        if local.shape != self.optimizer_parameter(fqn, "element").shape:
            return local.clone()  # a scalar state, the same on every rank
        return self.assemble(fqn, local)

    @torch.no_grad()
    def set_full(self, fqn: str, value: torch.Tensor, kind: str = "parameter") -> None:
        """See the Protocol."""
        fqn = self.canonical(fqn)
        if not isinstance(value, torch.Tensor):
            raise PolyscaleError(
                f"set_full({fqn!r}) with {value!r:.80}", why="it is no tensor", fix="Give the whole tensor"
            )
        if kind == "gradient":
            self.before_gradients()
        local = self.local(fqn, kind)
        if local is None:
            raise PolyscaleError(
                f"set_full({fqn!r}, kind={kind!r})",
                why=f"the parameter has no {kind!r} now",
                fix="Gradients exist between backward and step; optimizer states after the first step",
            )
        scalar = local.shape != self.optimizer_parameter(fqn, "element").shape
        expected = tuple(local.shape) if scalar else self.infos[fqn].shape
        if tuple(value.shape) != expected:
            raise PolyscaleError(
                f"set_full({fqn!r}) with a tensor of shape {tuple(value.shape)}",
                why=f"the whole {kind} has shape {expected}",
                fix="Give the whole tensor, the same on every rank",
            )
        local.copy_(value if scalar else self.extract(fqn, value.to(local.device)))
        if kind == "parameter":
            self.written([fqn])

    def iter_full(self, kind: str = "parameter") -> Iterator[tuple[str, torch.Tensor]]:
        """See the Protocol."""
        for fqn, info in self.infos.items():
            full = self.get_full(fqn, kind)
            if full is None:
                continue
            for name in info.names:
                yield name, full

    @torch.no_grad()
    def norms(self, *locals: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """See the Protocol: sums of squares, divided by how many ranks hold each element, added over all ranks."""
        tensors = [tensor for mapping in locals for tensor in mapping.values()]
        held = [self.infos[self.canonical(name)].multiplicity for mapping in locals for name in mapping]
        squares = sums_of_squares(tensors, dtype=self._wide, device=self._device)
        # Which multiplicities occur is the same on all ranks, so all skip the collective or none does.
        if any(ranks != self._topology.world_size for ranks in held):
            squares /= torch.tensor(held, dtype=self._wide, device=self._device)
            self._communication.all_reduce(squares, self._topology.group("norm")).wait()
        values = iter(squares.sqrt_().unbind())
        return [{name: next(values) for name in mapping} for mapping in locals]

    @contextlib.contextmanager
    def gathered(self, params: Iterable[str | nn.Parameter], modify: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """See the Protocol."""
        names = list(dict.fromkeys(self.canonical(param) for param in params))
        whole = {fqn: nn.Parameter(self._whole(fqn), self.infos[fqn].requires_grad) for fqn in names}
        before = {} if modify else {fqn: checksum(tensor) for fqn, tensor in whole.items()}
        saved = [self._swap_in(fqn, parameter) for fqn, parameter in whole.items()]
        self.gathering += 1
        try:
            yield {fqn: parameter.data for fqn, parameter in whole.items()}
        finally:
            self.gathering -= 1
            for undo in reversed(saved):
                undo()
        if modify:
            self._keep(whole)
        else:
            self._refuse_writes(whole, before)

    def _whole(self, fqn: str) -> torch.Tensor:
        full = self.get_full(fqn)
        assert full is not None
        return full.contiguous()

    def _keep(self, whole: dict[str, nn.Parameter]) -> None:
        for fqn, parameter in whole.items():
            if self._topology.world_size > 1:
                self._communication.broadcast(parameter.data, 0).wait_host()
            self.set_full(fqn, parameter.data)

    def _refuse_writes(self, whole: dict[str, nn.Parameter], before: dict[str, bytes]) -> None:
        changed = [fqn for fqn, parameter in whole.items() if checksum(parameter.data) != before[fqn]]
        if changed:
            raise PolyscaleError(
                f"Parameters were written inside gathered(modify=False): {', '.join(changed)}",
                why="such a write would be lost on the next step, so it was not kept on any rank",
                fix="Use gathered(params, modify=True); rank 0's values are then kept on every rank",
            )

    def _swap_in(self, fqn: str, parameter: nn.Parameter) -> Any:
        places = [place for name in self.infos[fqn].names for place in self._places.get(name, ())]
        old = [(module, attribute, module._parameters[attribute]) for module, attribute in places]
        for module, attribute, _ in old:
            module._parameters[attribute] = parameter

        def undo() -> None:
            for module, attribute, value in old:
                module._parameters[attribute] = value

        return undo

    def _state(self, fqn: str) -> dict[str, Any]:
        if self._optimizer is None:
            return {}
        return dict(self._optimizer.state.get(self.optimizer_parameter(fqn, self.granularity), {}))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's memory of ``tensor``: a DTensor's local part, another tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def checksum(tensor: torch.Tensor) -> bytes:
    """A digest of the exact bytes of ``tensor``."""
    import hashlib

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()


def _places(parts: list[Part]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Name -> where the module tree holds it. Every name of a tied parameter is listed, none twice."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for part in parts:
        for module_name, module in part.named_modules(every_name=True):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = public_name(".".join(filter(None, (module_name, attribute))))
                    places.setdefault(name, []).append((module, attribute))
    return places
