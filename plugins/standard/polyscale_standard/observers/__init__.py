"""Observers: events as lines of JSON, and metrics for TensorBoard.

Notable: both are off unless the configuration asks for them, open their file at the first event, and run on rank 0.
"""

from polyscale_standard.observers.jsonl import JsonlObserver, JsonlPlugin
from polyscale_standard.observers.tensorboard import TensorBoardObserver, TensorBoardPlugin

__all__ = ["JsonlObserver", "JsonlPlugin", "TensorBoardObserver", "TensorBoardPlugin"]
