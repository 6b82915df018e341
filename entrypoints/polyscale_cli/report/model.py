"""What the report consists of."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PluginRow:
    """One installed plugin.

    Attributes:
        kind: "accelerator", "optimizer", ...
        name: the name users select.
        distribution: who provides it.
        version: version of that distribution.
        interface: interface version it was written for ("1.0"); "" when it could not be loaded.
        available: whether it can be used here and now.
        why: why not, and what to do; "" when available.
        selected: whether ``auto`` would choose it.
        verified: hardware on which it last passed its tests, or "never".
    """

    kind: str
    name: str
    distribution: str
    version: str
    interface: str = ""
    available: bool = False
    why: str = ""
    selected: bool = False
    verified: str = "never"


@dataclass(frozen=True)
class KernelRow:
    """A kernel of an operator.

    Attributes:
        device_type: of the tensors it takes.
        module: the module that has it.
        owner: the distribution it comes from.
        state: of the module: "prebuilt", "built", "not built" or "cannot build".
        note: why not, and what to do; "" when there is a build.
    """

    device_type: str
    module: str
    owner: str
    state: str
    note: str = ""


@dataclass(frozen=True)
class OpRow:
    """One operator.

    Attributes:
        name: its name.
        owner: the distribution it comes from.
        status: "reference" (no kernel: PyTorch code runs), "kernels" (some are declared) or "broken".
        kernels: the declared ones; PyTorch code runs where none of them is built, or can be.
        why: what is wrong with it; "" otherwise.
    """

    name: str
    owner: str
    status: str
    kernels: tuple[KernelRow, ...] = ()
    why: str = ""

    @property
    def device_types(self) -> list[str]:
        """Device types that have a kernel for it, sorted."""
        return sorted({kernel.device_type for kernel in self.kernels})


@dataclass(frozen=True)
class Fact:
    """One fact about the machine.

    Attributes:
        name: what it is about.
        value: what was found.
        ok: whether that is as it should be.
        fix: what to do when it is not.
    """

    name: str
    value: str
    ok: bool = True
    fix: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What became of ``import torch``.

    Attributes:
        version: its version; None when it cannot be imported.
        error: why not, and what to do; "" otherwise.
    """

    version: str | None
    error: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
        polyscale: version of polyscale-core.
        python: version of Python.
        torch: what became of ``import torch``.
        plugins: rows by kind, for every kind of the table of kinds that is asked for, ops excepted.
        ops: rows of operators; None when not asked for.
        ready: whether an accelerator can be chosen, so that a training can be started.
        choice: which accelerator ``auto`` chooses, or why it cannot choose, in one sentence.
        system: facts about the machine.
    """

    polyscale: str
    python: str
    torch: TorchFacts
    plugins: dict[str, list[PluginRow]] = field(default_factory=dict)
    ops: list[OpRow] | None = None
    ready: bool = False
    choice: str = ""
    system: list[Fact] = field(default_factory=list)
