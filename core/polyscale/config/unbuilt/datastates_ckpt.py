"""``datastates_ckpt``: another writer of checkpoints, whose options are its own."""

from polyscale.config.section import Status
from polyscale.config.tree import Node

SECTION = Node(
    default=False,
    status=Status.NOT_BUILT,
    reason='backends.checkpoint: "dcp"',
    text="Write checkpoints with DataStates.",
    free=True,
    presence=True,
)
