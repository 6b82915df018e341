"""Loading one plugin by name: its class through stevedore, its hook through pluggy, its object against the Protocol.

Notable: everything is checked before the object is used, in the order in which it can fail: is the name provided once;
does the distribution fit this torch; does the module import; is it a class; which interface version; is the hook
spelt right and implemented once; does the object have every member of the Protocol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pluggy

from polyscale.discovery.catalogue import Installed, installed, kind_of, spoken
from polyscale.discovery.missing import unknown
from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import PluginError, nearest
from polyscale.hooks import PROJECT, HookSpecs, PluginContext
from polyscale.kinds import Kind


@dataclass(frozen=True)
class PluginInfo:
    """A plugin whose class is loaded: its entry point, its class, the interface version it was written for."""

    installed: Installed
    plugin: type
    interface_version: tuple[int, int]


def load(kind: str, name: str, context: PluginContext | None = None) -> Any:
    """Load plugin ``name`` of ``kind`` and return the object it hands over, checked against the kind's Protocol.

    Args:
        kind: "accelerator", "optimizer", ...
        name: entry-point name.
        context: what the hook may look at; its ``name`` is set to ``name``.

    Raises:
        PluginError: unknown or ambiguous name, broken module, other interface version, wrong hook or object.
    """
    context = PluginContext(name=name) if context is None else replace(context, name=name)
    spec = kind_of(kind)
    info = plugin_info(kind, name)
    entry = info.installed

    def hand_over() -> list[Any]:
        results: list[Any] = getattr(_manager(info).hook, spec.hook)(context=context)
        return results

    results = run_plugin_code(entry.label, f"Calling its hook {spec.hook}", hand_over, fix=_repair(entry))
    _check_object(results[0] if results else None, spec, entry)
    return results[0]


def plugin_info(kind: str, name: str) -> PluginInfo:
    """Load the class of plugin ``name``, and check its interface version, without making its object.

    Raises:
        PluginError: unknown or ambiguous name, broken module, other interface version.
    """
    spec = kind_of(kind)
    entry = find(kind, name)
    plugin = load_value(entry)
    if not isinstance(plugin, type):
        raise PluginError(
            entry.label,
            why=f"Its entry point {entry.value} names a {type(plugin).__name__}, not a class",
            fix=f"Let it name a class with one method marked @hookimpl, {spec.hook}(self, context)",
        )
    return PluginInfo(entry, plugin, _check_version(plugin, spec, entry))


def find(kind: str, name: str) -> Installed:
    """Return the one entry point called ``name``.

    Raises:
        PluginError: none is installed, or two distributions claim the name.
    """
    found = [entry for entry in installed(kind) if entry.name == name]
    if not found:
        raise unknown(kind, name)
    if len(found) > 1:
        owners = [f"{entry.distribution} {entry.version}" for entry in found]
        raise PluginError(
            f"{spoken(kind)} {name!r}",
            why=f"Several distributions claim this name: {' and '.join(owners)}",
            fix=f"Keep one of them, for instance by `pip uninstall {found[-1].distribution}`",
        )
    return found[0]


def load_value(entry: Installed) -> Any:
    """Import what ``entry`` names, with stdout redirected and its torch requirement checked first.

    Raises:
        PluginError: it was made for another torch, or its import raised, or called exit.
    """
    from polyscale.discovery.driver import load_entry_point
    from polyscale.discovery.requirements import check_torch

    check_torch(entry)
    doing = f"Importing {entry.value}"
    return run_plugin_code(entry.label, doing, lambda: load_entry_point(entry), fix=_repair(entry))


def _repair(entry: Installed) -> str:
    dist = entry.distribution
    return f"Repair it (`pip install --force-reinstall {dist}`) or remove it (`pip uninstall {dist}`)"


def _check_version(plugin: type, spec: Kind, entry: Installed) -> tuple[int, int]:
    stated = getattr(plugin, "interface_version", None)
    ours = f"{spec.version[0]}.{spec.version[1]}"
    match stated:
        case (int(major), int(minor)):
            pass
        case _:
            raise PluginError(
                entry.label,
                why=f"Its class {plugin.__qualname__} states interface_version {stated!r}",
                fix=f"Let it state the version it was written for: interface_version = {spec.version}",
            )
    if major == spec.version[0] and minor <= spec.version[1]:
        return major, minor
    outdated = "polyscale-core" if (major, minor) > spec.version else entry.distribution
    raise PluginError(
        entry.label,
        why=f"It was written for interface {major}.{minor} of {spec.name} plugins; this polyscale-core speaks {ours}",
        fix=f"Run `pip install --upgrade {outdated}`",
    )


class _Manager(pluggy.PluginManager):
    """pluggy's manager, which does not look for hooks among what every object has: most of its time went there."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Options of a method marked as a hook."""
        return None if _is_special(name) else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: object, name: str) -> pluggy.HookspecOpts | None:
        """Options of a specification."""
        return None if _is_special(name) else super().parse_hookspec_opts(module_or_class, name)  # type: ignore[arg-type]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _manager(info: PluginInfo) -> pluggy.PluginManager:
    """Make a pluggy manager that holds this plugin alone: no other can be called, or spoiled by one that fails."""
    manager = _Manager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    plugin = info.plugin()
    try:
        manager.register(plugin, name=f"{info.installed.kind}:{info.installed.name}")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _wrong_hook(str(error), info) from error
    _check_hook(manager, plugin, info)
    return manager


def _check_hook(manager: pluggy.PluginManager, plugin: Any, info: PluginInfo) -> None:
    hook = kind_of(info.installed.kind).hook
    mine = getattr(manager.hook, hook).get_hookimpls()
    if len(mine) == 1 and not (mine[0].hookwrapper or mine[0].wrapper):
        return
    if mine:
        raise _wrong_hook(f"{hook} must be implemented by exactly one method, and not as a wrapper", info)
    unmarked = callable(getattr(plugin, hook, None))
    raise _wrong_hook(f"{hook} is not {'marked with @hookimpl' if unmarked else 'implemented'}", info)


def _wrong_hook(why: str, info: PluginInfo) -> PluginError:
    hook = kind_of(info.installed.kind).hook
    near = nearest(hook, [name for name in dir(info.plugin) if name != hook and not name.startswith("__")])
    misspelt = f"Rename {near} to {hook}. " if near else ""
    return PluginError(
        info.installed.label,
        why=" ".join(why.split()),
        fix=f"{misspelt}Its class {info.plugin.__qualname__} needs: @hookimpl def {hook}(self, context)",
    )


def _check_object(made: object, spec: Kind, entry: Installed) -> None:
    protocol = spec.protocol_type()
    if made is None:
        why = f"Its hook {spec.hook} handed over nothing"
    elif isinstance(made, type):
        why = f"Its hook {spec.hook} handed over the class {made.__qualname__}, not an object of it"
    elif lacking := missing_members(made, protocol):
        why = f"Its hook {spec.hook} handed over a {type(made).__name__}, which lacks {', '.join(lacking)}"
    else:
        return
    raise PluginError(
        entry.label, why=why, fix=f"Hand over an object that implements {spec.protocol.replace(':', '.')}"
    )


def missing_members(made: object, protocol: type) -> list[str]:
    """Members of ``protocol`` that ``made`` has not, in the order of the Protocol; methods must be callable."""
    lacking = []
    for name, is_method in _members(protocol):
        try:
            found = inspect.getattr_static(made, name)
        except AttributeError:
            found = getattr(made, name, None) if hasattr(made, name) else _ABSENT
        if found is _ABSENT or (is_method and not _callable(made, name, found)):
            lacking.append(f"{name}()" if is_method else name)
    return lacking


_ABSENT = object()


def _callable(made: object, name: str, found: Any) -> bool:
    """Whether ``made.name`` can be called; properties are looked up only where a method is wanted."""
    return callable(found) or isinstance(found, staticmethod | classmethod) or callable(getattr(made, name, None))


def _members(protocol: type) -> list[tuple[str, bool]]:
    found: dict[str, bool] = {}
    for base in reversed(protocol.__mro__):
        if base.__module__ in ("typing", "builtins"):
            continue
        public: dict[str, Callable[..., Any] | Any] = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
        found.update({name: inspect.isfunction(value) for name, value in public.items() if not name.startswith("_")})
    return list(found.items())
