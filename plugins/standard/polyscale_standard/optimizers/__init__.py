"""Optimizers: Adam, AdamW, fused forms of both, SGD, Adagrad, LAMB, Lion, Muon, and any of ``torch.optim`` by name.

Notable: one small file per family. A factory checks hyper-parameters before anything is allocated and imports torch
only when it builds. Parameters come as local tensors with their names, so state is found by name and a parameter whose
gradient is None stands still.
"""

from polyscale_standard.optimizers.adagrad import AdagradPlugin
from polyscale_standard.optimizers.adam import AdamPlugin, AdamWPlugin
from polyscale_standard.optimizers.fused_adam import FusedAdamPlugin, FusedAdamWPlugin
from polyscale_standard.optimizers.lamb import LambPlugin
from polyscale_standard.optimizers.lion import LionPlugin
from polyscale_standard.optimizers.muon import MuonPlugin
from polyscale_standard.optimizers.sgd import SgdPlugin
from polyscale_standard.optimizers.torch_optim import TorchOptimPlugin

__all__ = [
    "AdagradPlugin",
    "AdamPlugin",
    "AdamWPlugin",
    "FusedAdamPlugin",
    "FusedAdamWPlugin",
    "LambPlugin",
    "LionPlugin",
    "MuonPlugin",
    "SgdPlugin",
    "TorchOptimPlugin",
]
