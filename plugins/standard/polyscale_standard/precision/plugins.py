"""The three precisions and how the configuration changes them.

Notable: a policy's None means "the master's own", which is how an fp64 model stays fp64 throughout under fp32. A
reduction is narrowed by ``communication_data_type`` only; gradients are never added in fewer than 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from polyscale.errors import ConfigError, nearest
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.precision import PrecisionPolicy
from polyscale_standard.precision.scaler import DynamicLossScaler, StaticLossScaler

if TYPE_CHECKING:
    import torch

    from polyscale.interfaces.precision import LossScaler

MAX_SKIPS_AT_FLOOR = 20

_DTYPES = {
    "fp64": "float64",
    "float64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}


class StandardPrecision:
    """Dtypes under one name; the loss is not scaled."""

    def __init__(self, name: str, compute: str | None, context: PluginContext) -> None:
        """``compute``: a dtype's name, or None for the master's own."""
        self.name = name
        self._compute = compute
        self._context = context

    def policy(self) -> PrecisionPolicy:
        """Dtypes: of compute from the precision's name, of the rest fp32 unless the configuration says otherwise.

        Raises:
            ConfigError: an unknown dtype name.
        """
        compute = self._asked("data_types.param_dtype") or (dtype(self._compute, "") if self._compute else None)
        wide = dtype("fp32", "fp32") if compute is not None else None
        return PrecisionPolicy(
            parameter=compute,
            master=wide,
            accumulation=self._accumulation() or wide,
            reduction=self._asked("communication_data_type") or wide,
            pinned=_names(setting(self._context, "data_types.keep_in_fp32_modules", None)),
        )

    def scaler(self) -> LossScaler | None:
        """None: the loss is not scaled."""
        return None

    def _accumulation(self) -> torch.dtype | None:
        asked = self._asked("data_types.grad_accum_dtype")
        if asked is not None and asked.itemsize < 4:
            raise ConfigError(
                f"data_types.grad_accum_dtype = {setting(self._context, 'data_types.grad_accum_dtype', None)!r}",
                why="gradients are never added in fewer than 32 bits here: small ones would be lost",
                fix="Leave it out, or write 'fp32'",
            )
        return asked

    def _asked(self, key: str) -> torch.dtype | None:
        value = setting(self._context, key, None)
        return None if value is None else dtype(value, key)


class Fp16Precision(StandardPrecision):
    """fp16 compute with a scaled loss."""

    def scaler(self) -> LossScaler:
        """A fresh scaler: static when ``fp16.loss_scale`` is above 0, dynamic otherwise.

        Raises:
            ConfigError: a setting is out of range.
        """
        limit = int(self._context.options.get("max_skips_at_floor", MAX_SKIPS_AT_FLOOR))
        static = float(self._of_fp16("loss_scale", 0))
        if static > 0:
            return StaticLossScaler(static, max_skips=limit)
        return DynamicLossScaler(
            initial=2.0 ** float(self._of_fp16("initial_scale_power", 16)),
            window=int(self._of_fp16("loss_scale_window", 1000)),
            hysteresis=int(self._of_fp16("hysteresis", 2)),
            consecutive_hysteresis=bool(self._of_fp16("consecutive_hysteresis", False)),
            floor=float(self._of_fp16("min_loss_scale", 1)),
            max_skips=limit,
        )

    def _of_fp16(self, key: str, default: Any) -> Any:
        return setting(self._context, f"fp16.{key}", default)


def dtype(name: str, key: str) -> torch.dtype:
    """Return torch's dtype for a configured ``name`` ("bf16"); ``key`` is named in the error.

    Raises:
        ConfigError: the name is unknown.
    """
    import torch

    attribute = _DTYPES.get(str(name).lower().removeprefix("torch."))
    if attribute is None:
        close = nearest(str(name), _DTYPES)
        raise ConfigError(
            f"{key}={name!r}",
            why="No dtype of that name can hold parameters or gradients",
            fix=(f"Did you mean {close!r}? " if close else "") + "Valid: fp64, fp32, bf16, fp16",
        )
    found: torch.dtype = getattr(torch, attribute)
    return found


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names to pin; "auto" leaves them to the model."""
    if given is None or given == "auto":
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def setting(context: PluginContext, key: str, default: Any) -> Any:
    """The value at a dotted ``key`` of the configuration; ``default`` when it is absent, None or "auto"."""
    value: Any = context.config
    for step in key.split("."):
        value = getattr(value, step, None)
    return default if value is None or value == "auto" else value


class Fp32Plugin:
    """Compute in the master's dtype: fp32, or fp64 for an fp64 model."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_precision(self, context: PluginContext) -> StandardPrecision:
        """Hand over the fp32 precision."""
        return StandardPrecision("fp32", None, context)


class Bf16Plugin:
    """Compute in bf16 over fp32 masters."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_precision(self, context: PluginContext) -> StandardPrecision:
        """Hand over the bf16 precision."""
        return StandardPrecision("bf16", "bf16", context)


class Fp16Plugin:
    """Compute in fp16 over fp32 masters, with a scaled loss."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_precision(self, context: PluginContext) -> Fp16Precision:
        """Hand over the fp16 precision."""
        return Fp16Precision("fp16", "fp16", context)
