"""``fp16``, ``bf16`` and ``data_types``: which dtype each copy of the numbers has.

Notable: dtypes are written "fp32", "fp16", "bf16", "fp64"; torch is not needed to read a configuration.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from polyscale.config.section import Int, Section, honoured, needs_plugin, no_effect, not_built

Dtype = Literal["fp16", "bf16", "fp32", "fp64"]

_MASTERS = "fp32 masters, which are what the optimizer updates"


class Fp16Section(Section):
    """fp16 compute with a scaled loss."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Compute in fp16; excludes bf16.")
    auto_cast: bool = no_effect(
        False, "Cast inputs to fp16.", reason="floating-point inputs are always cast to the dtype of compute"
    )
    loss_scale: float = honoured(0.0, "Fixed factor on the loss; 0 follows overflows (dynamic).", ge=0)
    initial_scale_power: Int = honoured(16, "The dynamic scale starts at 2 to this power.", ge=0, le=64)
    loss_scale_window: Int = honoured(1000, "Updates without overflow after which the scale doubles.", ge=1)
    hysteresis: Int = honoured(2, "Overflows in a row that are borne before the scale halves.", ge=1)
    consecutive_hysteresis: bool = honoured(False, "Refill the hysteresis at every update without overflow.")
    min_loss_scale: float = honoured(1.0, "Floor of the dynamic scale.", gt=0)
    fp16_master_weights_and_grads: bool = not_built(False, "Keep masters in fp16.", nearest=_MASTERS)


class Bf16Section(Section):
    """bf16 compute; the loss is not scaled."""

    switch: ClassVar = ("enabled", (False,))

    enabled: bool = honoured(False, "Compute in bf16; excludes fp16.")
    check_grad_overflow: bool = honoured(True, "Skip an update whose gradients hold inf or nan.")
    immediate_grad_update: bool = no_effect(
        False,
        "Copy gradients to fp32 as they are produced.",
        reason="gradients are always added in data_types.grad_accum_dtype (fp32) as they are produced",
    )
    bf16_master_weights_and_grads: bool = not_built(False, "Keep masters in bf16.", nearest=_MASTERS)
    bf16_optimizer_states: bool = not_built(False, "Keep moments in bf16.", nearest="optimizer states in fp32")


class DataTypesSection(Section):
    """Dtypes of accumulation, parameters and buffers."""

    grad_accum_dtype: Dtype | None = honoured(
        None, "Dtype in which gradients of micro-steps are added; null: fp32, or fp64 for fp64 parameters."
    )
    param_dtype: Dtype | None = honoured(None, "Dtype of parameters in compute; null: that of the precision.")
    buffer_dtype: Dtype | None = needs_plugin(
        None,
        "Dtype buffers are cast to; null leaves them as the model made them.",
        nearest="casting the buffers of the model before polyscale.initialize",
    )
    keep_in_fp32_modules: Literal["auto"] | list[str] = honoured(
        "auto",
        'Names or patterns of what computes in fp32; "auto": what the model itself names, and batch norms.',
    )
