"""Parameters that stay in their master's dtype under 16 bits without being asked to.

Two sources: what a transformers model itself names (``_keep_in_fp32_modules``), and batch normalisation, whose running
statistics stay fp32 and which torch cannot compute with 16-bit weights beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from polyscale.interfaces.precision import PrecisionPolicy
from polyscale.parameters.names import public_name

if TYPE_CHECKING:
    from polyscale.config import Config


def with_automatic_pins(policy: PrecisionPolicy, config: Config, model: nn.Module) -> PrecisionPolicy:
    """Add the automatic pins to ``policy`` where the configuration leaves them to the model ("auto")."""
    if policy.parameter is None or config.data_types.keep_in_fp32_modules != "auto":
        return policy
    return replace(policy, pinned_exactly=automatic_pins(model))


def automatic_pins(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters to pin, each once under its first name."""
    wanted = _named_by_model(model)
    pins: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or wanted & set(name.split(".")):
            prefix = public_name(name)
            own = [f"{prefix}.{key}" if prefix else key for key, p in module._parameters.items() if p is not None]
            pins.extend(own)
    known = {public_name(name) for name, _ in model.named_parameters()}
    return tuple(name for name in dict.fromkeys(pins) if name in known)


def _named_by_model(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            names.update(getattr(type(module), attribute, None) or ())
    return names
