"""Marks of recorded tensors: how a later look finds that one was edited, cast or replaced after its context.

Notable: nothing is watched. At the end of a context each tensor that was seen in it and has a recording gets its
version counter as an attribute; autograd counts every in-place operator there, one through a view or ``detach()`` too.
Another count later means an edit, which ran on meta and so did nothing; a mark on a meta tensor without a recording
means that its storage was replaced. The attribute is a plain number, so copies and pickles of a model are as they were.
"""

from __future__ import annotations

import weakref

import torch

from polyscale import _torch
from polyscale.parameters.deferred_log import history_of

_ATTRIBUTE = "_polyscale_version"


class Sightings:
    """The tensors that a context has seen; they are held weakly."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Remember a tensor before an operator runs on it."""
        known = self._seen.get(id(tensor))
        if known is not None and known() is tensor:
            return
        if not was_edited(tensor):  # an edit between two contexts stays visible: a new mark would hide it
            self._seen[id(tensor)] = weakref.ref(tensor)

    def mark(self) -> None:
        """Mark those that have a recording, and forget all."""
        for seen in self._seen.values():
            tensor = seen()
            if tensor is not None and history_of(tensor) is not None:
                setattr(tensor, _ATTRIBUTE, _torch.version(tensor))
        self._seen.clear()


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` had a recording when a context ended."""
    return hasattr(tensor, _ATTRIBUTE)


def was_edited(tensor: torch.Tensor) -> bool:
    """Whether an operator has written ``tensor`` since a context ended; an edit through ``.data`` is not counted."""
    return is_marked(tensor) and getattr(tensor, _ATTRIBUTE) != _torch.version(tensor)
