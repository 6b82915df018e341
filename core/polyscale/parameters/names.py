"""Names of parameters as users and checkpoints know them.

``torch.compile`` wraps a module in one whose only child is called ``_orig_mod``; the names of a compiled model, or of a
model with compiled blocks, are the same as without.
"""

from __future__ import annotations

_WRAPPER = "_orig_mod."


def public_name(name: str) -> str:
    """Return ``name`` without what torch's wrappers add to it; also for the name of a module."""
    return (name + ".").replace(_WRAPPER, "").removesuffix(".")
