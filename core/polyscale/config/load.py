"""``load_config``: from what the user wrote to one checked, frozen object.

Notable: the order. Read (keys twice), rename aliases, take overrides, find unknown keys, resolve "auto", refuse what is
not built, check types, check what cannot be true together. All mistakes are reported at once, each once: a value that
is wrong is taken out, and the rest is checked on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from pydantic import BaseModel

from polyscale import env
from polyscale.config import unbuilt
from polyscale.config.aliases import rename
from polyscale.config.auto import resolve_autos
from polyscale.config.config import Config
from polyscale.config.errors import WrongValueError, raise_all
from polyscale.config.extensions import extra_nodes, installed
from polyscale.config.origin import Origin, leaves
from polyscale.config.rules import contradictions
from polyscale.config.section import Status
from polyscale.config.source import Source, read
from polyscale.config.status import findings
from polyscale.config.tree import Node, misshapen, model_tree
from polyscale.config.unknown import remove_unknown
from polyscale.config.values import build, build_partly
from polyscale.errors import PolyscaleError

Readable = Mapping[str, Any] | str | PathLike[str] | Config


def load_config(source: Readable, *, seed: int | None = None, auto: Mapping[str, Any] | None = None) -> Config:
    """Read, resolve and check a configuration.

    Args:
        source: a dict, the path of a JSON file, JSON text, or a Config (returned as it is).
        seed: wins over the key ``seed``.
        auto: dotted path -> value for keys that hold "auto"; values for other keys are not used.

    Raises:
        ConfigError: what is wrong; ``SeveralConfigErrors`` when it is more than one thing.
        PluginError: the section of a plugin cannot be loaded.
    """
    if isinstance(source, Config):
        return source if seed is None else load_config(source.as_dict(), seed=seed)
    loading = Loading(read(source))
    loading.override(seed)
    config = loading.resolve(auto or {})
    raise_all(loading.errors, loading.source.name)
    return config


def examine(source: Readable) -> tuple[Config, list[PolyscaleError]]:
    """Return the configuration without what is wrong in it, so that it can be looked at further, and what is wrong.

    Raises:
        ConfigError: it cannot be read at all.
        PluginError: the section of a plugin cannot be loaded.
    """
    if isinstance(source, Config):
        return source, []
    loading = Loading(read(source))
    loading.override(None)
    return loading.resolve({}), loading.errors


@dataclass
class Loading:
    """One configuration on its way; ``errors`` collects all that is wrong with it."""

    source: Source
    errors: list[PolyscaleError] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.source.values
        self.errors.extend(rename(self.values))
        self.origins.update({path: self.source.origin for path, _ in leaves(self.values)})

    def override(self, seed: int | None) -> None:
        """Take the environment and the arguments, which win."""
        accelerator = env.accelerator_override()
        if accelerator is not None and isinstance(self.values.setdefault("backends", {}), dict):
            self.values["backends"]["accelerator"] = accelerator
            self.origins["backends.accelerator"] = Origin("environment", env.ACCELERATOR)
        if seed is not None:
            self.values["seed"] = seed
            self.origins["seed"] = Origin("argument", "seed=")

    def resolve(self, auto: Mapping[str, Any]) -> Config:
        """Return the configuration, without what is wrong; that is in ``errors``."""
        tree, models = self._known()
        self.errors.extend(remove_unknown(tree, self.values, {*tree.children, *unbuilt.NAMES, *installed()}))
        unresolved = resolve_autos(tree, self.values, self.origins, auto)
        self.errors.extend(unresolved)
        written = {key: dict(value) if isinstance(value, dict) else value for key, value in self.values.items()}
        self._precision_switches()
        found = findings(tree, self.values)
        self.errors.extend(f.error() for f in found if f.status is Status.NOT_BUILT)
        sections = self._sections(tree, models)
        own = {key: value for key, value in self.values.items() if key in Config.model_fields}
        config, wrong = build_partly(Config, own, tree)
        told = frozenset(path for error in unresolved for path in error.paths)
        self.errors.extend(error for error in wrong if error.given not in told)
        self.errors.extend(contradictions(config, written, told))
        config.attach(sections=sections, origins=self.origins, findings=tuple(found), source=self.source.name)
        return config

    def _known(self) -> tuple[Node, dict[str, type[BaseModel]]]:
        """Return the tree of known keys: those of Config, and of the other sections that are set."""
        core = model_tree(Config)
        extra, models = extra_nodes(key for key in self.values if key not in core.children)
        return Node(children={**core.children, **extra}), models

    def _precision_switches(self) -> None:
        """Let ``backends.precision`` turn on the section of its name, so that both always agree."""
        backends = self.values.get("backends")
        chosen = backends.get("precision") if isinstance(backends, dict) else None
        for name in ("fp16", "bf16"):
            section = self.values.setdefault(name, {}) if chosen == name else None
            if isinstance(section, dict) and "enabled" not in section:
                section["enabled"] = True
                self.origins[f"{name}.enabled"] = Origin("auto", f"backends.precision is {name}")

    def _sections(self, tree: Node, models: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
        """Return the sections that are no fields of Config: plugins' models, and the rest as written."""
        sections: dict[str, Any] = {}
        for name in [key for key in self.values if key not in Config.model_fields]:
            value = self.values[name]
            if name in models:
                value = self._model(models[name], name, tree.children[name])
            else:
                wrong = misshapen(tree.children[name], value, name)
                self.errors.extend(WrongValueError(f"{p} = {v!r}", why="expected an object") for p, v in wrong)
            sections[name] = value
        return sections

    def _model(self, model: type[BaseModel], name: str, node: Node) -> Any:
        value = self.values[name]
        if not isinstance(value, dict):
            self.errors.append(WrongValueError(f"{name} = {value!r}", why="expected an object"))
            return value
        built = build(model, value, node, name + ".")
        self.errors.extend(built if isinstance(built, list) else [])
        return built
