"""``amp``: Apex's mixed precision, whose arguments are its own."""

from polyscale.config.section import Status
from polyscale.config.tree import Node

SECTION = Node(
    status=Status.NOT_BUILT,
    reason="bf16.enabled or fp16.enabled",
    text="Mixed precision by Apex.",
    children={"enabled": Node(default=False, deepspeed=False)},
    free=True,
    switch=("enabled", (False, None)),
)
