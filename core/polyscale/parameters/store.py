"""ParameterStore: whole parameters, gradients and optimizer state by name, whatever shards them.

Checkpoints, export, LAMB's norms, Muon's matrices, LoRA and the DeepSpeed drop-in stand on it. Every call except
``local``, ``fragments`` and ``infos`` is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from polyscale.interfaces.checkpoint import Box
    from polyscale.interfaces.optimizer import Granularity
    from polyscale.parameters.info import ParamInfo


class ParameterStore(Protocol):
    """What every data-parallel plugin implements (most of it by ``ShardedStore``).

    ``kind`` is "parameter" (the master value), "gradient", or the name of an optimizer state ("exp_avg"). Names may be
    any of a tied parameter's names. A gradient exists from the first backward of an accumulation to its update: the sum
    over ranks and micro-steps so far, not averaged, times the loss scale under fp16; reading a whole one reduces what
    is pending.

    Attributes:
        infos: every parameter by its canonical name.
        granularity: that of the attached optimizer.
        flat: whether optimizers get 1-D ranges of tensors from it, so that none sees the shape of a whole one; an
            optimizer of granularity "tensor" is then refused.
        gathering: how many ``gathered`` contexts are open.
        before_gradients: set by the engine; reduces what is pending.
    """

    infos: Mapping[str, ParamInfo]
    granularity: Granularity
    flat: bool
    gathering: int
    before_gradients: Callable[[], None]

    def canonical(self, name: str | torch.nn.Parameter) -> str:
        """The canonical name of a parameter given by any of its names, or by the object in the module."""

    def optimizer_parameter(self, fqn: str, granularity: Granularity) -> torch.nn.Parameter:
        """What an optimizer of ``granularity`` updates for this parameter; the same object at each call."""

    def attach(self, optimizer: torch.optim.Optimizer, granularity: Granularity) -> None:
        """Tell the store which optimizer holds the states, and at which granularity it was given parameters."""

    def refuse_unfrozen(self) -> None:
        """Raise when a parameter that was frozen at the start has been unfrozen since: it would never train."""

    def state_names(self, fqn: str) -> tuple[str, ...]:
        """Names of the optimizer states of a parameter (empty before its first update)."""

    def local(self, fqn: str, kind: str = "parameter") -> torch.Tensor | None:
        """This rank's memory of it (a view; possibly empty)."""

    def fragments(self, fqn: str, local: torch.Tensor) -> tuple[Box, ...]:
        """Cut ``local`` (shaped like ``self.local(fqn)``) into boxes of the logical tensor."""

    def assemble(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of which each rank gives its ``local`` part. Collective."""

    def extract(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``full`` (shaped like ``self.local(fqn)``). Not collective."""

    def norms(self, *locals: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The 2-norms of whole tensors of which each rank gives its local part (of any shape, possibly empty).

        Each mapping goes from names of parameters to tensors that are cut as ``self.local(name)`` is: parameters,
        updates, ... There is one all-reduce for all of them, and none where every rank holds every element. All ranks
        give the same names in the same order. Collective.

        Returns:
            A mapping for each one given, with its names: 0-dim tensors on the device, fp64 where it has that, else
            fp32; equal on all ranks.
        """

    def written(self, names: Iterable[str] | None = None) -> None:
        """Masters were changed in place: bring what the model computes with up to date (None: all)."""

    def gathered(
        self, params: Iterable[str | torch.nn.Parameter], modify: bool = False
    ) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Give the module whole parameters for a while, and yield them by name. They are copies: the model cannot be
        called inside.

        With ``modify=True`` rank 0's values are broadcast at exit and kept. Without it any write, through ``.data``
        too, is found by a checksum and is an error at exit, at every stage.
        """

    def get_full(self, fqn: str, kind: str = "parameter") -> torch.Tensor | None:
        """The whole tensor, on every rank (a copy)."""

    def set_full(self, fqn: str, value: torch.Tensor, kind: str = "parameter") -> None:
        """Set the whole tensor; every rank gives the same ``value``."""

    def iter_full(self, kind: str = "parameter") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) one at a time on every rank, each tied name included."""
