"""A shard unit: a module whose parameters are gathered, freed and reduced together.

Notable: below stage 3 a unit only says which parameters share buffers. At stage 3 they refuse to be used while it is
released (see ``released``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from polyscale_zero.flat import Flat


@dataclass
class Unit:
    """See the module.

    Attributes:
        name: of its module in the whole model, "" for the root.
        module: whose calls need the parameters.
        flats: its buffers.
        is_root: whether it stays whole from forward to the end of backward.
    """

    name: str
    module: nn.Module
    flats: list[Flat] = field(default_factory=list)
    is_root: bool = False

    @property
    def label(self) -> str:
        """How messages name it."""
        return self.name or "the root unit"

    @property
    def is_ready(self) -> bool:
        """Whether all its parameters hold their values."""
        return all(flat.is_whole for flat in self.flats)

    @property
    def freed(self) -> list[Flat]:
        """The buffers that are freed between uses."""
        return [flat for flat in self.flats if not flat.kind.resident]

    @property
    def addresses(self) -> frozenset[int]:
        """Of the memory that is freed between uses, while it is whole."""
        return frozenset(flat.whole.untyped_storage().data_ptr() for flat in self.freed if flat.numel)

    @property
    def freed_numel(self) -> int:
        """Elements that a gather brings."""
        return sum(flat.numel for flat in self.freed)

    def start_gather(self, note: Callable[[str], None]) -> None:
        """Begin to gather what is not whole."""
        for flat in self.flats:
            if not flat.is_whole and not flat.pending:
                note(f"{self.label} all_gather")
                flat.start_gather()

    def finish_gather(self) -> None:
        """Wait until it is whole."""
        for flat in self.flats:
            flat.finish_gather()

    def release(self) -> None:
        """Free the memory."""
        for flat in self.freed:
            flat.release()
