"""What a plugin's author needs to test a plugin: real ranks, a parity suite, counted collectives.

**Ranks.** :func:`ranks` gives a pool of real processes that start once per test session and are used by many cases::

    from polyscale.testing import ranks

    def sums_over_ranks(value):                      # top level of the test module, any file name
        tensor = torch.full((3,), float(value + dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor

    def test_sums_over_ranks():
        first, second = ranks(2).run(sums_over_ranks, 1)
        assert torch.equal(first, second)

Each case runs in a fresh default process group (gloo on loopback by default, 30 s until a collective gives up), with
``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` set, one thread per process, warnings as errors and
all generators seeded with ``seed`` (0). Arguments and results are pickled; tensors, and functions and classes of test
modules, may be among them. After the case engines are closed, the group is destroyed and garbage collected. A case
has 60 s (``timeout=``). When a rank raises, ends (``os._exit``, a signal) or does not finish, :class:`RanksFailed`
tells for every rank what it did, wrote and where it stood, and the next case gets new processes: catch what you expect
inside the function, it is faster. Modules stay loaded between cases; environment variables, set by ``env=``, do not.

``ranks(2, accelerator="sim")`` gives ranks that have activated that accelerator, with its default communication and
device rank modulo count current; they are other processes than those of another accelerator, or of none.

The processes are forked from one that has imported torch, and end with the test process, however it ends.
:func:`close_pools` ends them earlier; :func:`pool_reports` says what they cost.

**Fresh processes.** :func:`ranks_once` is for cases about kill -9, exit codes and start-up: processes that end with the
script or function that they run, and an :class:`Outcome` for each rank.

**Parity.** ``polyscale.testing.parity`` trains small awkward models on 2 ranks and compares losses, weights and
gradient norms with one process of plain torch on the joined batch. A data-parallel plugin, a communication backend or
an accelerator passes by::

    from polyscale.testing import parity

    SUITE = parity.Suite(parity.parity_cases("mine", stages=(1, 2, 3), communication="shm"))

    @pytest.mark.parametrize("case", SUITE.cases, ids=str)
    def test_parity(case):
        parity.check(case, SUITE.result(case))

**Devices.** ``polyscale.testing.real_device`` checks an accelerator on its hardware: every method, every declared
capability, a training against float64. Where the hardware is absent, ``polyscale.testing.stand_in`` makes a module that
has the names and signatures recorded by ``polyscale.testing.signatures`` and no others, and
``polyscale.testing.device_checks`` calls every method over it. Such a module changes torch for the whole process:
``polyscale.testing.alone`` runs a function in a process of its own.

**The rest.** :func:`count_collectives` records launches by kind, size and order. :func:`assert_close_to_oracle` and
:func:`assert_no_farther` compare named tensors. :func:`tiny_gpt2` is a real architecture that fits every test.
:func:`settled_memory` reads the bytes in use on a device when they have stopped changing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Collective": "collectives",
    "Collectives": "collectives",
    "Outcome": "once",
    "PoolReport": "pool",
    "RankFailure": "failures",
    "RankPool": "pool",
    "RanksFailed": "failures",
    "RemoteError": "failures",
    "assert_close_to_oracle": "closeness",
    "assert_no_farther": "closeness",
    "close_pools": "pool",
    "count_collectives": "collectives",
    "pool_reports": "pool",
    "ranks": "pool",
    "ranks_once": "once",
    "settled_memory": "memory",
    "tiny_gpt2": "models",
}

__all__ = sorted([*_LAZY, "parity"])

if TYPE_CHECKING:
    from polyscale.testing import parity as parity
    from polyscale.testing.closeness import assert_close_to_oracle as assert_close_to_oracle
    from polyscale.testing.closeness import assert_no_farther as assert_no_farther
    from polyscale.testing.collectives import Collective as Collective
    from polyscale.testing.collectives import Collectives as Collectives
    from polyscale.testing.collectives import count_collectives as count_collectives
    from polyscale.testing.failures import RankFailure as RankFailure
    from polyscale.testing.failures import RanksFailed as RanksFailed
    from polyscale.testing.failures import RemoteError as RemoteError
    from polyscale.testing.memory import settled_memory as settled_memory
    from polyscale.testing.models import tiny_gpt2 as tiny_gpt2
    from polyscale.testing.once import Outcome as Outcome
    from polyscale.testing.once import ranks_once as ranks_once
    from polyscale.testing.pool import PoolReport as PoolReport
    from polyscale.testing.pool import RankPool as RankPool
    from polyscale.testing.pool import close_pools as close_pools
    from polyscale.testing.pool import pool_reports as pool_reports
    from polyscale.testing.pool import ranks as ranks


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"polyscale.testing.{_LAZY[name]}"), name)
    if name == "parity":
        return import_module("polyscale.testing.parity")
    raise AttributeError(f"module 'polyscale.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
