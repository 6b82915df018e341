"""Precisions: fp32, bf16 and fp16, as dtypes per copy of the numbers, and fp16's loss scaler.

Notable: masters, accumulation and reduction are fp32 whatever the compute dtype; ``communication_data_type`` and
``data_types`` override one of them each. The loss scaler is a state machine of plain numbers.
"""

from polyscale_standard.precision.plugins import Bf16Plugin, Fp16Plugin, Fp32Plugin
from polyscale_standard.precision.scaler import DynamicLossScaler, StaticLossScaler

__all__ = ["Bf16Plugin", "DynamicLossScaler", "Fp16Plugin", "Fp32Plugin", "StaticLossScaler"]
