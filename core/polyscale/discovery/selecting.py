"""Choosing: an explicit name wins and its failure is an error; ``auto`` says what was tried and why it was rejected.

Notable: an accelerator is chosen automatically only when exactly one that may be (``auto = True``, not cpu) is
available: two is a question to the user, never a preference order kept here. Nothing is activated: that is the
engine's to do, so that ``scale-report`` can ask without touching a device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from polyscale import env
from polyscale.discovery.catalogue import installed, kind_of, spoken
from polyscale.discovery.loading import load
from polyscale.discovery.missing import unknown
from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import PluginError, PolyscaleError
from polyscale.hooks import PluginContext

if TYPE_CHECKING:
    from polyscale.interfaces.accelerator import Accelerator

logger = logging.getLogger("polyscale")
AUTO = "auto"
_FALLBACK = "cpu"


@dataclass(frozen=True)
class Attempt:
    """One plugin that was considered.

    Attributes:
        name: its name.
        accepted: whether it can be used.
        why: why not; "" when accepted.
        fix: what to do about it, where it is broken.
        broken: whether it failed to load, rather than being unavailable here or not offered to ``auto``.
    """

    name: str
    accepted: bool
    why: str = ""
    fix: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Choice:
    """The outcome: the name, the object, and everything that was considered on the way."""

    name: str
    object: Any
    attempts: tuple[Attempt, ...]

    def explain(self) -> str:
        """One sentence: what was chosen, and why the others were not."""
        rejected = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in self.attempts if not attempt.accepted)
        return f"{self.name}" + (f" (not {rejected})" if rejected else "")


def select_accelerator(requested: str = AUTO, *, context: PluginContext | None = None) -> Accelerator:
    """Return the accelerator to use, not yet activated.

    Args:
        requested: a name, or "auto"; ``POLYSCALE_ACCELERATOR`` wins over it.
        context: what its hook may look at, as in :func:`select`.

    Raises:
        PluginError: the named one cannot be used (with the cause); or ``auto`` found two, or none and no cpu.
    """
    return cast("Accelerator", choose_accelerator(requested, context=context).object)


def choose_accelerator(requested: str = AUTO, *, context: PluginContext | None = None) -> Choice:
    """As :func:`select_accelerator`, with what was considered; says the outcome of ``auto`` once at INFO."""
    override = env.accelerator_override()
    requested = override or requested
    if requested != AUTO:
        origin = f" ({env.ACCELERATOR})" if override else ""
        return _explicit("accelerator", requested, context, origin=origin)
    found, attempts = _automatic(context)
    if len(found) > 1:
        raise _two_accelerators(found)
    for attempt in attempts:
        if attempt.broken:
            _say_once(logging.WARNING, f"Accelerator {attempt.name} cannot be used: {attempt.why}. {attempt.fix}")
    chosen = [Choice(name, made, tuple(attempts)) for name, made in found.items()]
    choice = chosen[0] if chosen else _fall_back(attempts, context)
    _say_once(logging.INFO, f"Accelerator: {choice.explain()}")
    return choice


def select(
    kind: str, requested: str = AUTO, *, default: Sequence[str] = (), context: PluginContext | None = None
) -> Any:
    """Return the object of a plugin of ``kind``.

    Args:
        kind: any kind but observer, of which all are used.
        requested: a name, or "auto".
        default: names that "auto" tries, in this order; those not installed are skipped.
        context: what its hook may look at. ``options`` are taken from its configuration where it has one.

    Raises:
        PluginError: the named one cannot be used; or "auto" found none, with the reason for each.
    """
    return choose(kind, requested, default=default, context=context).object


def choose(
    kind: str, requested: str = AUTO, *, default: Sequence[str] = (), context: PluginContext | None = None
) -> Choice:
    """As :func:`select`, with what was considered."""
    kind_of(kind)
    if requested != AUTO:
        return _explicit(kind, requested, context)
    attempts: list[Attempt] = []
    for name in default:
        made, attempt = _try(kind, name, context)
        attempts.append(attempt)
        if attempt.accepted:
            return Choice(name, made, tuple(attempts))
    tried = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in attempts)
    names = sorted({entry.name for entry in installed(kind)})
    raise PluginError(
        f"No {kind} can be used",
        why=f"Tried {tried}" if tried else "There is none to try",
        fix=f"Name one of those installed: {', '.join(names) or 'none'}",
    )


def availability(kind: str, name: str, made: Any) -> str:
    """Return "" when ``made`` can be used here, else the reason. Kinds without ``is_available`` always can."""
    if not callable(getattr(made, "is_available", None)):
        return ""
    label = f"{spoken(kind)} {name!r}"

    def ask() -> str:
        return "" if made.is_available() else (made.why_unavailable() or "it is not available and gives no reason")

    try:
        return run_plugin_code(label, "Asking whether it is available", ask, fix="")
    except PolyscaleError as error:
        return error.why or str(error)


def _explicit(kind: str, name: str, context: PluginContext | None, *, origin: str = "") -> Choice:
    made = load(kind, name, _context(name, context))
    why = availability(kind, name, made)
    if not why:
        return Choice(name, made, (Attempt(name, True),))
    others = sorted({entry.name for entry in installed(kind)} - {name})
    raise PluginError(
        f"{spoken(kind)} {name!r}{origin} cannot be used here",
        why=why,
        fix=f"Or choose another: {', '.join(others)}" if others else "",
    )


def _try(kind: str, name: str, context: PluginContext | None) -> tuple[Any, Attempt]:
    if not any(entry.name == name for entry in installed(kind)):
        return None, Attempt(name, False, "not installed")
    try:
        made = load(kind, name, _context(name, context))
    except PolyscaleError as error:
        return None, Attempt(name, False, error.why, error.fix, broken=True)
    why = availability(kind, name, made)
    return made, Attempt(name, accepted=not why, why=why)


def _automatic(context: PluginContext | None) -> tuple[dict[str, Any], list[Attempt]]:
    """Ask every accelerator but cpu. Returns those that may be chosen, and what was considered."""
    found: dict[str, Any] = {}
    attempts: list[Attempt] = []
    for name in sorted({entry.name for entry in installed("accelerator")} - {_FALLBACK}):
        made, attempt = _try("accelerator", name, context)
        if attempt.accepted and not made.auto:
            attempt = replace(attempt, accepted=False, why="used only when named")
        if attempt.accepted:
            found[name] = made
        attempts.append(attempt)
    return found, attempts


def _fall_back(attempts: list[Attempt], context: PluginContext | None) -> Choice:
    if not any(entry.name == _FALLBACK for entry in installed("accelerator")):
        tried = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in attempts)
        missing = unknown("accelerator", _FALLBACK)
        raise PluginError("No accelerator can be used", why=tried, fix=missing.fix)
    choice = _explicit("accelerator", _FALLBACK, context)
    return replace(choice, attempts=(*attempts, *choice.attempts))


def _two_accelerators(found: dict[str, Any]) -> PluginError:
    names = list(found)
    return PluginError(
        f"Several accelerators are available: {', '.join(names)}",
        why="Auto chooses only when there is exactly one",
        fix=" or ".join(f'"backends": {{"accelerator": "{name}"}}' for name in names)
        + f" in the configuration, or {env.ACCELERATOR}={names[0]} in the environment",
    )


def _context(name: str, context: PluginContext | None) -> PluginContext:
    """The context for ``name``: its own options, ``backends.options.<name>``, where there is a configuration."""
    if context is None:
        return PluginContext(name=name)
    backends = getattr(context.config, "backends", None)
    if backends is None:
        return replace(context, name=name)
    return replace(context, name=name, options=(getattr(backends, "options", None) or {}).get(name, {}))


@lru_cache(maxsize=64)
def _say_once(level: int, message: str) -> None:
    """Log on rank 0; the cache makes a second engine of the same process silent."""
    if env.launch().rank == 0:
        logger.log(level, message)
