"""Recorder: runs a model's construction on the meta device and logs what it does to each storage.

Notable: every ATen operator passes through one method. A factory that would allocate a large floating tensor returns a
meta tensor instead; operators on such tensors run on meta (shapes only) and are logged. Random operators first run for
real on memory that is freed at once, so that the generator moves exactly as in an eager construction. What needs real
numbers (``item``, boolean masks, copies into real tensors) gets them by replaying. Python code that asks a deferred
tensor for its device is told cpu, because torch's own initialisers skip tensors on meta.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polyscale import _torch
from polyscale.errors import PolyscaleError
from polyscale.parameters.deferred_facade import Facade, is_cpu
from polyscale.parameters.deferred_log import (
    Geometry,
    History,
    Operation,
    TensorRef,
    Version,
    history_of,
    leaves,
    map_leaves,
    reference,
    start_history,
)
from polyscale.parameters.deferred_marks import Sightings
from polyscale.parameters.deferred_operators import (
    FILLS,
    GEOMETRY_ONLY,
    UNINITIALISED,
    brings_to_meta,
    covers_storage,
    needs_values,
    sets_target,
    written_tensors,
)
from polyscale.parameters.deferred_replay import real_value

_META = torch.device("meta")
_LARGE = 1 << 20  # bytes


class Recorder:
    """Logs operators. ``threshold``: smallest number of elements of a tensor that is deferred.

    ``seeds``: None moves the real generator and stores its states (an eager start, bit by bit); else a function from
    the history that a random operator writes to a seed, and no generator is touched.
    """

    def __init__(self, *, threshold: int, seeds: Callable[[History | None], int] | None = None) -> None:
        self._threshold = threshold
        self._seeds = seeds
        self._clock = 0
        self._sightings = Sightings()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread does."""
        try:
            with _torch.dispatch_mode(self._dispatch), Facade(self.virtual, self._sightings.see):
                yield
        finally:
            self._sightings.mark()

    def virtual(self, tensor: torch.Tensor) -> torch.Tensor:
        """A deferred tensor with the values that a real one has now."""
        with _torch.without_modes():
            clone = torch.ops.aten.clone.default
            meta: torch.Tensor = clone(_shadow(tensor))
            self._log(clone, (tensor,), {}, [meta], [], None)
        return meta

    def uninitialised(self, tensor: torch.Tensor) -> torch.Tensor:
        """A deferred tensor laid out like ``tensor``, without values so far."""
        with _torch.without_modes():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
            start_history(meta, self._clock)
        return meta

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _torch.without_modes():
            tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(history_of(tensor) is not None for tensor in tensors):
                return self._on_deferred(func, args, kwargs, tensors)
            if self._may_defer(func, kwargs, tensors):
                return self._defer(func, args, kwargs, tensors)
            return func(*args, **kwargs)

    # Operators on real tensors, and factories.

    def _may_defer(self, func: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> bool:
        if kwargs.get("pin_memory") or not (is_cpu(kwargs.get("device")) or brings_to_meta(func, kwargs)):
            return False
        if kwargs.get("layout") not in (None, torch.strided) or needs_values(func):
            return False
        if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
            return False
        reads = func.name() not in GEOMETRY_ONLY and not brings_to_meta(func, kwargs)
        if reads and any(tensor.numel() >= self._threshold for tensor in tensors):
            return False  # the values are in memory already, and would be held twice
        return not _torch.returns_alias(func) and not _torch.written_arguments(func)

    def _defer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        try:
            result = self._on_meta(func, args, kwargs, factory=not tensors)
        except (RuntimeError, NotImplementedError, TypeError):  # no meta kernel, or an error that the real one explains
            return func(*args, **kwargs)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        large = any(tensor.numel() >= self._threshold and _is_float(tensor.dtype) for tensor in made)
        if not (large or brings_to_meta(func, kwargs)):
            return func(*args, **kwargs)
        random = self._advance(func, args, kwargs, None)
        self._log(func, args, kwargs, made, [], random)
        return result

    # Operators on deferred tensors.

    def _on_deferred(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        _refuse_empty_meta(func, tensors)
        for tensor in tensors:
            self._sightings.see(tensor)
        written = written_tensors(func, args, kwargs)
        into_real = any(history_of(tensor) is None for tensor in written)
        elsewhere = not is_cpu(kwargs.get("device")) and kwargs["device"].type != "meta"
        if into_real or elsewhere or needs_values(func):
            return self._with_values(func, args, kwargs, written)
        try:
            result = self._on_meta(func, args, kwargs, factory="device" in kwargs)
        except (RuntimeError, NotImplementedError):
            return self._with_values(func, args, kwargs, written)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        is_new = any(history_of(tensor) is None for tensor in made)
        if torch.Tag.inplace_view in func.tags or not (is_new or written):
            for tensor in made:
                self._sightings.see(tensor)
            return result  # a view: the tensor itself carries its geometry
        target = history_of(written[0]) if written else None
        random = self._advance(func, args, kwargs, target)
        self._log(func, args, kwargs, made, written, random)
        return result

    def _with_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> Any:
        """Run for real on replayed inputs; a deferred tensor that is written gets the operator in its log."""
        if not any(history_of(tensor) is not None for tensor in written):
            return func(*map_leaves(args, real_value), **map_leaves(kwargs, real_value))
        if any(history_of(tensor) is None for tensor in written):
            raise PolyscaleError(
                f"{func.name()} inside partitioned_init",
                why="it writes into tensors of which some are recorded and some are real",
                fix="Write them in separate calls, or build this model without partitioned_init",
            )
        self._log(func, args, kwargs, [], written, self._advance(func, args, kwargs, history_of(written[0])))
        return written[0] if func._schema.returns else None

    # Common parts.

    def _on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, factory: bool) -> Any:
        def shadow(leaf: Any) -> Any:
            return _shadow(leaf) if isinstance(leaf, torch.Tensor) else leaf

        meta_kwargs = map_leaves(kwargs, shadow)
        if factory:
            meta_kwargs["device"] = _META
        if "generator" in meta_kwargs:
            meta_kwargs["generator"] = None
        return func(*map_leaves(args, shadow), **meta_kwargs)

    def _advance(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: History | None
    ) -> torch.Tensor | int | None:
        """Move the generator as the real operator would; return its state before, or the seed that stands for it."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        if self._seeds is not None:
            return self._seeds(target)
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        fills = {id(tensor) for tensor in written_tensors(func, args, kwargs)} if func.name() in FILLS else set()
        geometry: Any = args[0] if func.name() in GEOMETRY_ONLY else None

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in fills or leaf is geometry:
                return _scratch(leaf)
            return real_value(leaf)

        func(*map_leaves(args, real), **map_leaves(kwargs, real))
        return state

    def _log(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: list[torch.Tensor],
        written: list[torch.Tensor],
        random: torch.Tensor | int | None,
    ) -> None:
        touched = [history for leaf in leaves((args, kwargs)) if (history := history_of(leaf)) is not None]
        self._clock = max([self._clock, *(history.clock for history in touched)]) + 1
        outputs = [None if history_of(tensor) is not None else self._new(tensor) for tensor in made]
        for history in touched:
            history.clock = self._clock
        if func.name() in UNINITIALISED and not written:
            return
        places = [reference(tensor, _expect(tensor)) for tensor in written]
        operation = self._operation(func, args, kwargs, outputs, written, random)
        for ref in outputs:
            if ref is not None:
                ref.history.head = Version(operation, None)
        for ref in places:
            overwrites = sets_target(func, args, kwargs) and covers_storage(ref)
            ref.history.head = Version(operation, None if overwrites else ref.version)

    def _operation(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[TensorRef | None],
        written: list[torch.Tensor],
        random: torch.Tensor | int | None,
    ) -> Operation:
        geometry: Any = args[0] if func.name() in GEOMETRY_ONLY else None
        targets = {id(tensor) for tensor in written}
        overwrites = sets_target(func, args, kwargs)
        reads: list[Version] = []

        def stored(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if isinstance(leaf, torch.Generator):
                return None
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf is geometry:
                return Geometry(tuple(leaf.shape), leaf.stride(), leaf.dtype)
            history = history_of(leaf)
            if history is None:
                return leaf.detach().clone()
            ref = reference(leaf, history)
            if ref.version is not None and not (id(leaf) in targets and overwrites):
                reads.append(ref.version)
            ref.version = None  # or it would keep alive what was overwritten
            return ref

        new_args, new_kwargs = map_leaves(args, stored), map_leaves(kwargs, stored)
        if outputs and not any(isinstance(leaf, torch.Tensor) for leaf in leaves((args, kwargs))):
            new_kwargs["device"] = torch.device("cpu")
        return Operation(
            number=self._clock,
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            outputs=tuple(outputs),
            random=random,
            default_dtype=torch.get_default_dtype(),
            reads=tuple(reads),
        )

    def _new(self, tensor: torch.Tensor) -> TensorRef:
        self._sightings.see(tensor)
        return reference(tensor, start_history(tensor, self._clock))


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _expect(tensor: torch.Tensor) -> History:
    history = history_of(tensor)
    assert history is not None
    return history


def _scratch(like: torch.Tensor) -> torch.Tensor:
    """Real memory laid out like ``like``, given back to the system when it is dropped.

    Large pieces bypass malloc: with the small generator states stored in between, its heap would keep most of them.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    if like.numel() == 0 or extent * like.element_size() < _LARGE:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    memory = mmap.mmap(-1, extent * like.element_size())
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def _refuse_empty_meta(func: Any, tensors: list[torch.Tensor]) -> None:
    if any(tensor.is_meta and history_of(tensor) is None for tensor in tensors):
        raise PolyscaleError(
            f"{func.name()} of a recorded tensor and one made on the meta device",
            why="a tensor made with device='meta' has no values",
            fix="Inside partitioned_init leave the device out; memory is saved all the same",
        )


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
