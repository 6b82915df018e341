"""Names of kinds as users write them: singular or plural."""

from __future__ import annotations

from polyscale.errors import PolyscaleError, nearest
from polyscale.kinds import KINDS

OP = "op"


def parse_kind(text: str) -> str:
    """Return the kind called ``text`` ("optimizer", "optimizers").

    Raises:
        PolyscaleError: there is none.
    """
    word = text.strip().lower()
    for kind in KINDS.values():
        if word in (kind.name, kind.plural):
            return kind.name
    near = nearest(word, KINDS)
    hint = f"Did you mean {near!r}? " if near else ""
    raise PolyscaleError(
        f"Kind {text!r}", why="there is no such kind of plugin", fix=f"{hint}Kinds: {', '.join(KINDS)}"
    )
