"""Parallelism: spreads a model over ranks.

Model-parallel plugins (``role = "model"``) act first and may replace modules or parameters; then exactly one
data-parallel plugin (``role = "data"``) shards or replicates what is left and returns the store and the gradient
synchroniser that the engine works with. The engine holds a list of parts from the first day: pipeline stages have
several per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from polyscale.config import Config
    from polyscale.errors import PolyscaleError
    from polyscale.interfaces.accelerator import Accelerator
    from polyscale.interfaces.communication import Communication
    from polyscale.interfaces.precision import PrecisionPolicy
    from polyscale.parameters.materialize import Materializer
    from polyscale.parameters.store import ParameterStore
    from polyscale.topology import Topology


@dataclass(frozen=True)
class Part:
    """A module that this rank runs.

    Attributes:
        module: the module.
        prefix: what its parameters' names begin with in the whole model; "" for all of it.
    """

    module: nn.Module
    prefix: str = ""

    def named_modules(self, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
        """Modules and their names in the whole model; ``every_name``: a module in two places comes twice."""
        for name, module in self.module.named_modules(remove_duplicate=not every_name):
            yield ".".join(filter(None, (self.prefix.rstrip("."), name))), module


@dataclass(frozen=True)
class ParallelContext:
    """What a plugin may use to apply itself.

    Attributes:
        config: the resolved configuration.
        topology: meshes and groups; nothing else makes groups.
        accelerator: the device type.
        communication: collectives on tensors of ``device``.
        precision: dtypes of compute, master, accumulation and reduction.
        device: where this rank's parameters go.
        materializer: starting values by name, whether the model is real, deferred or on the meta device.
        note: tells the watchdog what this rank does now, for the message when a rank fails; cheap.
    """

    config: Config
    topology: Topology
    accelerator: Accelerator
    communication: Communication
    precision: PrecisionPolicy
    device: torch.device
    materializer: Materializer
    note: Callable[[str], None] = lambda detail: None

    @property
    def predivisor(self) -> float:
        """What gradients are divided by before a reduction (``gradient_predivide_factor``); the engine undoes it."""
        reduced = self.topology.dp_size > 1 and self.config.prescale_gradients
        return float(self.config.gradient_predivide_factor) if reduced else 1.0


@dataclass
class Applied:
    """What a model-parallel plugin did.

    Attributes:
        parts: what the next plugin, or the engine, works with.
        replaced: old parameter -> new parameter, for optimizers made before.
        close: undoes hooks and frees what was made; called once.
    """

    parts: list[Part]
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Holding:
    """Memory that a data-parallel plugin uses beside masters, their gradients and the optimizer's states.

    Attributes:
        kind: what it is, in the plural ("gathered parameters", "gradient buckets").
        name: whose it is: a parameter, a unit.
        tensor: the memory; several views of one storage count once.
    """

    kind: str
    name: str
    tensor: torch.Tensor


@dataclass
class DataParallelApplied(Applied):
    """What a data-parallel plugin did.

    Attributes:
        store: whole parameters from their parts.
        gradients: reduced gradients from backwards.
        explain: turns an exception of forward or backward that the spreading caused into one a user understands, or
            returns None.
        recover: brings modules and gradients back to idle after such an exception, and frees what it has left; called
            before the next forward, and at once when memory has run out.
        holdings: what it holds in memory just now, for the message when memory runs out.
    """

    store: ParameterStore = None  # type: ignore[assignment]
    gradients: GradientSynchronizer = None  # type: ignore[assignment]
    explain: Callable[[Exception], PolyscaleError | None] = lambda error: None
    recover: Callable[[], None] = lambda: None
    holdings: Callable[[], Iterable[Holding]] = lambda: ()


class GradientSynchronizer(Protocol):
    """Turns the gradients of backwards into reduced gradients of the optimizer's parameters.

    A micro-step holds any number of backwards, which add. Gradients are sums over ranks: the engine divides.

    Attributes:
        divisor: what the sums were divided by before the reduction (``ParallelContext.predivisor``).
    """

    divisor: float

    def before_backward(self, *, last: bool, hold: bool) -> None:
        """A backward is about to run: ``last`` micro-step of the accumulation; ``hold``: do not communicate."""

    def after_backward(self) -> None:
        """The backward has ended; ranks have called the same sequence of collectives."""

    def finish(self, equal: Sequence[int] = ()) -> None:
        """Reduce what is pending and wait; afterwards ``store.local(name, "gradient")`` is the sum over ranks, or
        None for a parameter that had no gradient on any rank. More backwards may follow, and another ``finish``.

        Args:
            equal: numbers that must be the same on all data-parallel ranks (fewer than 2**31 in size).

        Raises:
            RankError: they are not.
        """

    def clear(self) -> None:
        """Drop all gradients, pending ones too (after an update, or a skipped one)."""


@runtime_checkable
class Parallelism(Protocol):
    """A way to spread a model.

    Attributes:
        name: the plugin's name ("fsdp2").
        role: "model" or "data".
        stages: ZeRO stages that a data-parallel plugin implements.
        honours: dotted configuration keys that it reads, beyond those that core reads itself.
    """

    name: str
    role: Literal["model", "data"]
    stages: tuple[int, ...]
    honours: frozenset[str]

    def apply(self, parts: list[Part], context: ParallelContext) -> Applied:
        """Spread ``parts``. Collective; a data-parallel plugin returns :class:`DataParallelApplied`."""
