"""Keys that have two names, and sections with a short form: brought to one spelling before anything else."""

from __future__ import annotations

from typing import Any

from polyscale.config.errors import WrongValueError
from polyscale.config.sections.zero import Stage3Keys

_TOP = {"bfloat16": "bf16"}
_ZERO = {
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{key.removeprefix("stage3_"): key for key in Stage3Keys.model_fields if key.startswith("stage3_")},
}


def rename(values: dict[str, Any]) -> list[WrongValueError]:
    """Bring ``values`` (in place) to one spelling; return an error for each key given under both names."""
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": 1} if values["zero_optimization"] else {"stage": 0}
    errors = _rename(values, _TOP, "")
    zero = values.get("zero_optimization")
    if isinstance(zero, dict):
        errors += _rename(zero, _ZERO, "zero_optimization.")
    return errors


def _rename(values: dict[str, Any], names: dict[str, str], prefix: str) -> list[WrongValueError]:
    errors = []
    for old, new in names.items():
        if old not in values:
            continue
        value = values.pop(old)
        if new in values:
            errors.append(
                WrongValueError(f"{prefix}{old} and {prefix}{new}", why="they are two names of one key", fix="Keep one")
            )
        else:
            values[new] = value
    return errors
