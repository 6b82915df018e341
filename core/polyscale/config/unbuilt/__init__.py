"""The top-level sections of DeepSpeed that nothing here builds yet: one small table each, read when the key is set.

Notable: their keys are known, so a typo in them is found, and a section that is present but off is accepted. A plugin
that builds one publishes a model of the same name in the entry-point group ``polyscale.config``, which wins.
"""

from __future__ import annotations

from importlib import import_module

from polyscale.config.tree import Node

NAMES: frozenset[str] = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "comms_logger",
        "compile",
        "compression_training",
        "curriculum_learning",
        "data_efficiency",
        "datastates_ckpt",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "hybrid_engine",
        "nebula",
        "pipeline",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "tensor_parallel",
        "timers",
        "torch_autocast",
        "weight_quantization",
    }
)


def node(name: str) -> Node:
    """Return the keys of one section, from the module of its name."""
    found = import_module(f"{__name__}.{name}").SECTION
    if not isinstance(found, Node):
        raise TypeError(f"{__name__}.{name}.SECTION is no Node")
    return found
