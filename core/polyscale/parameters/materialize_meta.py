"""The seeded start of a model that was built on the meta device.

Notable: the model's own initialisers run once, on a shadow of the model whose tensors are recorded and hold nothing, so
an initialiser that reaches into another module (GPT-2 scales its residual projections so) works as it does eagerly.
Each random operator is given its own seed, hash(seed, name of the parameter it fills, count), and a value is computed
by replaying what was recorded for it. Initialisers are ``reset_parameters()`` of each module, children first, then
``_init_weights(module)`` of the transformers model that owns it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from polyscale.errors import PolyscaleError
from polyscale.parameters.deferred_log import History, history_of, reference
from polyscale.parameters.deferred_recorder import Recorder
from polyscale.parameters.deferred_replay import replay_reference

_WAY_OUT = (
    "Build the model under polyscale.partitioned_init() instead of on the meta device, or give its module a "
    "reset_parameters() that sets it"
)


class MetaStart:
    """Starting values of the tensors in ``empty`` (canonical name -> meta tensor of ``model``).

    Args:
        model: the model they belong to; it is not changed.
        empty: what has no values.
        seed: see the module.
        prefix: of the model's names, with its dot.

    Raises:
        PolyscaleError: no initialiser sets one of them.
    """

    def __init__(self, model: nn.Module, empty: dict[str, torch.Tensor], *, seed: int, prefix: str) -> None:
        self._seed = seed
        self._counts: Counter[str] = Counter()
        self._module = ""
        self._names: dict[History, str] = {}
        self._failures: dict[str, Exception] = {}
        # Threshold 1: every floating tensor that an initialiser makes is recorded too, and so draws from its own seed.
        self._recorder = Recorder(threshold=1, seeds=self._next_seed)
        # A tied tensor has a shadow at each of its places, and the first that is set counts: models are tied after
        # they are initialised, and the later place's initialiser must not undo the first one's (padding_idx).
        self._shadows: dict[int, list[torch.Tensor]] = {}
        wanted = {id(tensor) for tensor in empty.values()}
        names = {id(tensor): name for name, tensor in empty.items()}
        shadow = self._shadow_module(model, names, {})
        touched = _owners(model, wanted)
        with self._recorder.recording(), torch.no_grad(), _own_random(), torch.device("cpu"):
            self._reset(shadow, model, touched, prefix)
            self._initialize_transformers(shadow, model, touched, prefix)
        self._tensors = {name: _first_set(self._shadows[id(tensor)]) for name, tensor in empty.items()}
        self._check(empty)
        self._shadows.clear()
        self._names.clear()

    def value(self, name: str) -> torch.Tensor:
        """Compute one value on the CPU."""
        tensor = self._tensors[name]
        history = history_of(tensor)
        assert history is not None
        value = replay_reference(reference(tensor, history), poison=True)
        if (value.is_floating_point() or value.is_complex()) and bool(value.isnan().any()):
            raise PolyscaleError(
                f"{name} is on the meta device", why="its module's initialiser sets only a part of it", fix=_WAY_OUT
            )
        return value

    def _next_seed(self, target: History | None) -> int:
        known = self._names.get(target) if target is not None else None
        return self._seed_of(known if known is not None else f"in {self._module}")

    def _seed_of(self, name: str) -> int:
        self._counts[name] += 1
        text = f"{self._seed}\0{name}\0{self._counts[name]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    # The shadow: the same modules, without values.

    def _shadow_module(self, module: nn.Module, names: dict[int, str], made: dict[int, nn.Module]) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        shadow = made[id(module)] = object.__new__(type(module))
        state = dict(module.__dict__)
        state["_parameters"] = {
            key: None if value is None else self._shadow_tensor(value, names, parameter=True)
            for key, value in module._parameters.items()
        }
        state["_buffers"] = {
            key: None if value is None else self._shadow_tensor(value, names, parameter=False)
            for key, value in module._buffers.items()
        }
        state["_modules"] = {
            key: None if child is None else self._shadow_module(child, names, made)
            for key, child in module._modules.items()
        }
        shadow.__dict__.update(state)
        return shadow

    def _shadow_tensor(self, tensor: torch.Tensor, names: dict[int, str], *, parameter: bool) -> torch.Tensor:
        if nn.parameter.is_lazy(tensor):
            raise PolyscaleError(
                "A lazy parameter without a shape", why="it cannot be spread", fix="Run the model once on a small input"
            )
        readable = not parameter and tensor.device.type == "cpu" and history_of(tensor) is None
        made = self._recorder.virtual(tensor) if readable else self._recorder.uninitialised(tensor)
        history = history_of(made)
        assert history is not None
        if id(tensor) in names:
            self._names[history] = names[id(tensor)]
        result = nn.Parameter(made, requires_grad=tensor.requires_grad) if parameter else made
        self._shadows.setdefault(id(tensor), []).append(result)
        return result

    # The initialisers.

    def _reset(self, shadow: nn.Module, model: nn.Module, touched: set[int], prefix: str) -> None:
        for name, module, twin in _children_first(model, shadow):
            if id(module) not in touched:
                continue
            for method in ("reset_parameters", "_reset_parameters"):
                initialise = getattr(twin, method, None)
                if callable(initialise):
                    self._call(prefix + name, initialise)
                    break

    def _initialize_transformers(self, shadow: nn.Module, model: nn.Module, touched: set[int], prefix: str) -> None:
        owners: dict[str, Any] = {}
        for name, module, twin in [*_children_first(model, shadow)][::-1]:  # parents first
            parent = owners.get(name.rpartition(".")[0]) if name else None
            owner = twin if _is_transformers(module) else parent
            if owner is not None:
                owners[name] = owner
        for name, module, twin in _children_first(model, shadow):
            owner = owners.get(name)
            if owner is not None and id(module) in touched:
                self._call(prefix + name, partial(owner._init_weights, twin))

    def _call(self, name: str, initialise: Callable[[], Any]) -> None:
        """Run one initialiser; what it draws outside of recorded tensors is seeded by the module's name."""
        self._module = name
        seed = self._seed_of(f"module {name}")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            initialise()
        except Exception as error:  # it counts only if nothing else sets the module's tensors
            self._failures[name] = error

    def _check(self, empty: dict[str, torch.Tensor]) -> None:
        missing = [
            name
            for name, tensor in empty.items()
            if tensor.numel() and (history := history_of(self._tensors[name])) is not None and history.head is None
        ]
        if not missing:
            return
        name = missing[0]
        failure = self._failures.get(name.rpartition(".")[0])
        more = f" ({len(missing) - 1} more like it)" if len(missing) > 1 else ""
        kind = "parameter" if isinstance(empty[name], nn.Parameter) else "buffer"
        why = (
            f"its module's initialiser raised {failure!r}" if failure else "its module has no initialiser that sets it"
        )
        raise PolyscaleError(f"The {kind} {name} is on the meta device{more}", why=why, fix=_WAY_OUT) from failure


def _first_set(shadows: list[torch.Tensor]) -> torch.Tensor:
    for shadow in shadows:
        history = history_of(shadow)
        if history is not None and history.head is not None:
            return shadow
    return shadows[0]


def _children_first(model: nn.Module, shadow: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    """(name, module, its shadow) of every module once, children before their parent, in the order of registration."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module, twin: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, child in module._modules.items():
            other = twin._modules[key]
            if child is not None and other is not None:
                yield from walk(f"{name}.{key}" if name else key, child, other)
        yield name, module, twin

    return list(walk("", model, shadow))


def _owners(model: nn.Module, wanted: set[int]) -> set[int]:
    """Ids of the modules that have one of the ``wanted`` tensors in themselves or below."""
    found: set[int] = set()

    def visit(module: nn.Module) -> bool:
        own = any(id(t) in wanted for t in [*module._parameters.values(), *module._buffers.values()])
        below = [visit(child) for child in module._modules.values() if child is not None]
        if own or any(below):
            found.add(id(module))
        return own or any(below)

    visit(model)
    return found


def _is_transformers(module: nn.Module) -> bool:
    """Whether a module initialises modules below it the way transformers' ``PreTrainedModel`` does."""
    return all(hasattr(module, name) for name in ("_init_weights", "init_weights", "config"))


@contextmanager
def _own_random() -> Iterator[None]:
    """Keep the random numbers of torch, Python and NumPy as they are outside."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
