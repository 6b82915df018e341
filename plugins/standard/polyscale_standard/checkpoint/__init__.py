"""The ``dcp`` storage: logical tensors in the format of torch.distributed.checkpoint, which torch itself can read.

Notable: this module imports neither torch nor DCP; ``storage`` is loaded when a checkpoint is first touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from polyscale.interfaces.checkpoint import LogicalTensor, StoredTensor


class DcpStorage:
    """CheckpointStorage over torch.distributed.checkpoint (see ``polyscale.interfaces.checkpoint``).

    ``group`` is a group whose backend moves host memory (gloo); None stands for the default group, or for this
    process alone where there is none. Every rank of it must see ``directory``.
    """

    name = "dcp"

    def write(
        self, directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: ProcessGroup | None
    ) -> None:
        """Write the owners' boxes of all tensors into an existing, empty ``directory`` and fsync. Collective."""
        from polyscale_standard.checkpoint.storage import write

        write(directory, tensors, group)

    def contents(self, directory: str | PathLike[str]) -> dict[str, StoredTensor]:
        """Names, shapes and dtypes in ``directory``. Local; executes nothing from the files."""
        from polyscale_standard.checkpoint.storage import contents

        return contents(directory)

    def read(
        self, directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: ProcessGroup | None
    ) -> None:
        """Fill the boxes of all ``tensors``. Collective; nothing is filled unless every rank can be served."""
        from polyscale_standard.checkpoint.storage import read

        read(directory, tensors, group)


class DcpPlugin:
    """Checkpoint storage ``dcp``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_checkpoint(self, context: PluginContext) -> DcpStorage:
        """Hand over the storage."""
        return DcpStorage()
