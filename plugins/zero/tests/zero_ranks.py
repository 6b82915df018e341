"""What the tests of zero share on ranks: a default group of the communication under test."""

from datetime import timedelta

import torch.distributed as dist

from polyscale._torch import default_store
from polyscale.discovery import load
from polyscale.hooks import PluginContext

TIMEOUT_S = 30.0


def regroup(communication):
    """Replace the default group of the pool, which is of gloo, by one of ``communication``. Collective."""
    if communication in ("auto", dist.get_backend()):
        return
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    backend = load("communication", communication, PluginContext(communication)).backend("cpu")
    wait = timedelta(seconds=TIMEOUT_S)
    store.set(f"left/{rank}", "here")  # a gloo group must not end while a rank still connects
    store.wait([f"left/{each}" for each in range(world)], wait)
    dist.destroy_process_group()
    prefixed = dist.PrefixStore(communication, store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=wait)


def engine_over_its_communication(case, model):
    """The engine of a case of the parity suite, on a default group of the case's communication."""
    from polyscale.testing import parity

    regroup(dict(case.backends)["communication"])
    return parity.polyscale_engine(case, model)
