"""Materializer: the starting value of each parameter and buffer by name, whatever the model was built on.

Notable: it hides three starts. *real*: the tensor itself. *deferred* (``partitioned_init``): replayed, bit by bit the
eager start. *meta* (``torch.device("meta")``): the module's own initialisers, with random numbers seeded by (seed,
name), so a value depends neither on the world size, nor on the stage, nor on which values were asked for before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from polyscale.errors import PolyscaleError, nearest
from polyscale.parameters.deferred_log import history_of, reference
from polyscale.parameters.deferred_marks import is_marked, was_edited
from polyscale.parameters.deferred_replay import replay_reference
from polyscale.parameters.fingerprint import Start, start_of
from polyscale.parameters.materialize_meta import MetaStart


def materializer(model: nn.Module, *, seed: int, prefix: str = "") -> Materializer:
    """Look at a model before it is spread, and return the source of its starting values.

    Args:
        model: holds real tensors, deferred ones, or ones on the meta device.
        seed: of the meta start; the same on all ranks.
        prefix: of ``model``'s names in the whole model, when it is a part of it.

    Raises:
        PolyscaleError: a tensor on the meta device that no initialiser sets, or one made under ``partitioned_init``
            that was edited, cast or replaced after it.
    """
    return Materializer(model, seed=seed, prefix=prefix)


class Materializer:
    """Starting values by name; see :func:`materializer`.

    Attributes:
        kind: "deferred" where any tensor is, else "meta" where any is, else "real". Only a "meta" value is equal on
            all ranks by itself.
    """

    kind: Start

    def __init__(self, model: nn.Module, *, seed: int, prefix: str = "") -> None:
        dot = prefix + "." if prefix else ""
        self._canonical: dict[str, str] = {}
        self._real: dict[str, weakref.ref[torch.Tensor]] = {}
        self._recorded: dict[str, torch.Tensor] = {}
        self._buffers = [dot + name for name, _ in model.named_buffers(remove_duplicate=False)]
        empty: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for local, tensor in named:
            name = first.setdefault(id(tensor), dot + local)
            self._canonical[dot + local] = name
            if name != dot + local:
                continue
            if history_of(tensor) is not None:
                self._recorded[name] = tensor
            elif tensor.is_meta:
                empty[name] = tensor
            else:
                self._real[name] = weakref.ref(tensor)
        self.kind = start_of(tensor for _, tensor in named)
        _refuse_changes(self._recorded, empty)
        self._meta = MetaStart(model, empty, seed=seed, prefix=dot) if empty else None

    def value(self, fqn: str) -> torch.Tensor:
        """Return the whole starting value of a parameter or buffer, with its dtype, without gradient.

        A deferred or meta one is computed at each call, on the CPU, and not kept; a real one is the model's own memory.

        Args:
            fqn: its name in the whole model; of a tied one, any.

        Raises:
            PolyscaleError: no such name; or the initialisers set only a part of it.
        """
        name = self._canonical.get(fqn)
        if name is None:
            close = nearest(fqn, self._canonical)
            raise PolyscaleError(
                f"No parameter or buffer {fqn!r}",
                why=f"the model has {len(self._canonical)} names" + (f", the nearest is {close!r}" if close else ""),
                fix="Use a name of named_parameters() or named_buffers()",
            )
        if name in self._real:
            tensor = self._real[name]()
            if tensor is None:
                raise PolyscaleError(
                    f"The starting value of {fqn!r}",
                    why="the model has given its memory back",
                    fix="Ask for it earlier",
                )
            return tensor.detach()
        if name in self._recorded:
            tensor = self._recorded[name]
            history = history_of(tensor)
            if history is None:
                raise PolyscaleError(
                    f"The starting value of {fqn!r}",
                    why="its recording was forgotten",
                    fix="Ask for it before forget()",
                )
            return replay_reference(reference(tensor, history))
        assert self._meta is not None
        return self._meta.value(name)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value) of every buffer, tied names included, one value in memory at a time."""
        for name in self._buffers:
            yield name, self.value(name)


def _refuse_changes(recorded: dict[str, torch.Tensor], empty: dict[str, torch.Tensor]) -> None:
    """Refuse a recorded model in which something would start with other values than it was given."""
    edited = [name for name, tensor in recorded.items() if was_edited(tensor)]
    if edited:
        raise PolyscaleError(
            f"{edited[0]} was edited after the block of partitioned_init{_others(edited)}",
            why="it is recorded and holds no values yet, and what is done to it outside of the block (load_state_dict, "
            "an initialiser, copy_) is not recorded and would be lost",
            fix="Edit it inside 'with polyscale.partitioned_init():', use load_state_dict(..., assign=True), or set it "
            "after initialize with engine.load() or engine.parameters_store.set_full()",
        )
    lost = [name for name, tensor in empty.items() if is_marked(tensor)]
    if lost:
        raise PolyscaleError(
            f"{lost[0]} was cast or replaced after the block of partitioned_init{_others(lost)}",
            why="its recording belongs to the tensor that it was, and what is there now is on the meta device and has "
            "no values",
            fix="Cast it inside 'with polyscale.partitioned_init():', or leave it as it is and let the configuration "
            "choose the dtype (bf16.enabled)",
        )
    if recorded and empty:
        name = next(iter(empty))
        raise PolyscaleError(
            f"{name} is on the meta device without a recording, in a model built under partitioned_init",
            why="it was made outside of the context (a new module, a copy), where nothing is recorded",
            fix="Make it inside 'with polyscale.partitioned_init():'",
        )


def _others(names: list[str]) -> str:
    return f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
