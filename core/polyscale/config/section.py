"""What a section of the configuration is made of: a frozen pydantic model whose fields say their status.

Notable: a field is written with the function that names its status, so the table of what is honoured, what has no
effect here and what is not built yet stands where the key is declared:

    stage: Int = honoured(0, "What is sharded ...", ge=0, le=3)
    overlap_comm: bool | None = no_effect(None, "Reduce while ...", reason="gradients are always reduced ...")

Values are strict (``"3"`` is not a number, ``1`` is not a boolean), but ``5e8`` is a whole number, as JSON writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Status(str, Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect here"
    NEEDS_PLUGIN = "needs a plugin that honours it"
    NOT_BUILT = "not built yet"


class _Marker(Enum):
    SAME = "same"
    NEW = "new"


SAME = _Marker.SAME
"""DeepSpeed has the same default."""
NEW = _Marker.NEW
"""DeepSpeed has no such key."""


@dataclass(frozen=True)
class Marks:
    """What a field says beside its default and text; it is kept in the field's ``json_schema_extra``.

    Attributes:
        status: what becomes of the key.
        deepspeed: DeepSpeed's default, ``SAME`` or ``NEW``.
        reason: why it changes nothing, or what works instead.
        takes_auto: whether "auto" below it is its owner's business.
    """

    status: Status
    deepspeed: Any
    reason: str = ""
    takes_auto: bool = False


class Section(BaseModel):
    """Base of all sections.

    Attributes:
        switch: the key that turns the section on, and its values that mean off.
        presence: whether the section asks for its feature by being there at all.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        validate_default=False,
        protected_namespaces=(),
    )
    switch: ClassVar[tuple[str, tuple[Any, ...]] | None] = None
    presence: ClassVar[bool] = False


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_whole)]
"""A whole number; ``5e8`` counts as one."""


def honoured(default: Any, text: str, *, deepspeed: Any = SAME, takes_auto: bool = False, **constraints: Any) -> Any:
    """Declare a key that does what it says.

    Args:
        default: ``...``: it must be given; a section's class: it is always there, with that section's defaults.
        text: a sentence about it.
        deepspeed: DeepSpeed's default, where it is another; NEW: DeepSpeed has no such key.
        takes_auto: whether "auto" below it is its owner's business.
        constraints: of the value (``ge``, ``gt``, ``le``, ``lt``, ``min_length``).
    """
    return _field(default, text, Marks(Status.HONOURED, deepspeed, takes_auto=takes_auto), constraints)


def no_effect(default: Any, text: str, *, reason: str, deepspeed: Any = SAME, **constraints: Any) -> Any:
    """Declare a key that is harmless here; ``reason`` says why it changes nothing."""
    return _field(default, text, Marks(Status.NO_EFFECT, deepspeed, reason), constraints)


def needs_plugin(default: Any, text: str, *, nearest: str, deepspeed: Any = SAME, **constraints: Any) -> Any:
    """Declare a key that a plugin may honour; without one it is refused with ``nearest``, what works instead."""
    return _field(default, text, Marks(Status.NEEDS_PLUGIN, deepspeed, nearest), constraints)


def not_built(default: Any, text: str, *, nearest: str, deepspeed: Any = SAME, **constraints: Any) -> Any:
    """Declare a key that is refused unless it has its default; ``nearest`` says what works instead."""
    return _field(default, text, Marks(Status.NOT_BUILT, deepspeed, nearest), constraints)


def _field(default: Any, text: str, marks: Marks, constraints: dict[str, Any]) -> Any:
    extra: Any = dict(vars(marks))  # not asdict, which would copy the default
    if isinstance(default, type) and issubclass(default, Section):
        return Field(default_factory=default, description=text, json_schema_extra=extra, **constraints)
    return Field(default, description=text, json_schema_extra=extra, **constraints)
