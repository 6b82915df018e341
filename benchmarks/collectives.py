"""Collectives of two ranks over shared memory against gloo's, and against a plain copy of the bytes that must move.

    python benchmarks/collectives.py [--rounds 15] [--sizes 4 65536 1048576 67108864] [--busy 0.5]

A size is the bytes that one rank gives to all_gather, gets from reduce_scatter, or holds for all_reduce and broadcast;
elements are fp32. In every round each way runs once, in an order that turns: ``gloo`` its collective, ``pairs`` the
same by isend and irecv over gloo, ``shm`` with ordinary tensors, ``shm+`` with tensors of ``allocate``, ``copy`` a
``copy_`` into as many bytes as the collective writes, on all ranks that it writes on at once. A time is that of the
slower rank; ratios are those within a round. Before the first and between rounds it refuses to go on where other
processes use more than ``--busy`` cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import load_average, median_interval, require_idle, write

SIZES = (4, 2**16, 2**20, 2**26)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
WAYS = ("gloo", "pairs", "shm", "shm+", "copy")
RATIOS = (("gloo", "shm"), ("gloo", "shm+"), ("pairs", "shm+"), ("shm", "copy"), ("shm+", "copy"))
SECONDS_PER_TURN = 0.02


class Buffers:
    """The tensors of one way: ``given`` and ``taken`` of all_gather, and of the others by turns."""

    def __init__(self, numel: int, make: Callable[[int], Any]) -> None:
        self.part, self.whole, self.spare = make(numel), make(2 * numel), make(numel)
        for tensor in (self.part, self.whole, self.spare):
            tensor.fill_(1.0)

    def reset(self, rank: int) -> None:
        """Numbers whose sums are known."""
        self.part.fill_(rank + 1.0)
        self.whole.fill_(rank + 1.0)


def by_communication(communication: Any, group: Any, buffers: Buffers) -> dict[str, Callable[[], None]]:
    """The four collectives through polyscale's protocol."""
    part, whole = buffers.part, buffers.whole
    return {
        "all_gather": lambda: communication.all_gather(whole, part, group).wait(),
        "reduce_scatter": lambda: communication.reduce_scatter(part, whole, group).wait(),
        "all_reduce": lambda: communication.all_reduce(part, group).wait(),
        "broadcast": lambda: communication.broadcast(part, 0, group).wait(),
    }


def by_pairs(group: Any, buffers: Buffers) -> dict[str, Callable[[], None]]:
    """The same by hand: what the other rank lacks is sent, and added where it is a sum."""
    import torch.distributed as dist

    part, spare, rank = buffers.part, buffers.spare, dist.get_rank()
    mine, other = (buffers.whole.chunk(2)[index] for index in (rank, 1 - rank))

    def exchange(sent: Any, received: Any) -> None:
        for work in [dist.isend(sent, 1 - rank, group), dist.irecv(received, 1 - rank, group)]:
            if work is not None:  # a rank outside the group gets none
                work.wait()

    def all_gather() -> None:
        exchange(part, other)
        mine.copy_(part)

    def reduce_scatter() -> None:
        import torch

        exchange(other, spare)
        torch.add(mine, spare, out=part)

    def all_reduce() -> None:
        exchange(part, spare)
        part.add_(spare)

    def broadcast() -> None:
        (dist.recv if rank else dist.send)(part, 1 - rank, group)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "broadcast": broadcast,
    }


def by_copy(buffers: Buffers, source: Buffers, rank: int) -> dict[str, Callable[[], None]]:
    """A copy of as many bytes as the collective writes on this rank."""
    one = lambda: buffers.part.copy_(source.part)  # noqa: E731
    both = lambda: buffers.whole.copy_(source.whole)  # noqa: E731
    nothing = lambda: None  # noqa: E731
    return {"all_gather": both, "reduce_scatter": one, "all_reduce": one, "broadcast": one if rank else nothing}


def check(name: str, way: str, run: Callable[[], None], buffers: Buffers, rank: int) -> None:
    """Run a collective once and compare with what it must bring."""
    buffers.reset(rank)
    run()
    if way == "copy":
        return
    right = {"all_gather": None, "reduce_scatter": 3.0, "all_reduce": 3.0, "broadcast": 1.0}[name]
    if right is not None:
        good = bool((buffers.part == right).all())
    else:
        good = all(bool((row == index + 1).all()) for index, row in enumerate(buffers.whole.chunk(2)))
    if not good:
        raise SystemExit(f"{name} by {way} on rank {rank} is wrong")


class Ranks:
    """What one rank needs for timing: groups, ways, and the longer of both ranks' times."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from polyscale.discovery import load
        from polyscale.hooks import PluginContext

        torch.set_num_threads(1)
        candidate = options.communication
        self.gloo = load("communication", "gloo", PluginContext("gloo"))
        self.shm = load("communication", candidate, PluginContext(candidate))
        name = self.shm.backend("cpu")
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.control, self.plain = dist.new_group([0, 1]), dist.new_group([0, 1])
        self.shared = dist.new_group([0, 1], backend=name)

    def ways(self, numel: int) -> dict[str, tuple[dict[str, Callable[[], None]], Buffers]]:
        """The calls of every way at one size, and their tensors."""
        import torch

        def ordinary(count: int) -> Any:
            return torch.empty(count, dtype=torch.float32)

        def allocated(count: int) -> Any:
            return self.shm.allocate(count, dtype=torch.float32, device=torch.device("cpu"))

        made = {way: Buffers(numel, allocated if way == "shm+" else ordinary) for way in WAYS}
        return {
            "gloo": (by_communication(self.gloo, self.plain, made["gloo"]), made["gloo"]),
            "pairs": (by_pairs(self.plain, made["pairs"]), made["pairs"]),
            "shm": (by_communication(self.shm, self.shared, made["shm"]), made["shm"]),
            "shm+": (by_communication(self.shm, self.shared, made["shm+"]), made["shm+"]),
            "copy": (by_copy(made["copy"], made["gloo"], self.rank), made["copy"]),
        }

    def slower(self, seconds: float) -> float:
        """The larger of both ranks' numbers."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return float(tensor.item())

    def timed(self, run: Callable[[], None], repeats: int) -> float:
        """Seconds of one call on the slower rank, both having begun at once."""
        self.slower(0.0)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return self.slower((time.perf_counter() - started) / repeats)

    def idle(self, options: argparse.Namespace, when: str) -> float:
        """Refuse on all ranks where rank 0 finds the machine busy; the cores that others use."""
        share = -1.0
        if self.rank == 0:
            print(f"{when}: load average {load_average():.2f}", flush=True)
            try:
                share = require_idle({options.root}, limit=options.busy)
            except SystemExit:
                self.slower(1.0)
                raise
        if self.slower(0.0) > 0.0:
            raise SystemExit(2)
        return share


def worker(options: argparse.Namespace) -> None:
    """One rank: check every way, then take turns; figures and table on rank 0."""
    ranks = Ranks(options)
    plans = {size: ranks.ways(max(1, size // 4)) for size in options.sizes}
    repeats: dict[tuple[int, str, str], int] = {}
    for size, plan in plans.items():
        for way, (calls, buffers) in plan.items():
            for name, run in calls.items():
                check(name, way, run, buffers, ranks.rank)
                took = ranks.timed(run, 3)
                repeats[size, name, way] = max(1, min(500, int(SECONDS_PER_TURN / max(took, 1e-7))))
    times: dict[tuple[int, str, str], list[float]] = {key: [] for key in repeats}
    loads, shares = [], []
    for number in range(options.rounds):
        shares.append(round(ranks.idle(options, f"round {number + 1} of {options.rounds}"), 3))
        loads.append(load_average())
        for size, plan in plans.items():
            for name in COLLECTIVES:
                for turn in range(len(WAYS)):
                    way = WAYS[(turn + number) % len(WAYS)]
                    run = plan[way][0][name]
                    times[size, name, way].append(ranks.timed(run, repeats[size, name, way]))
    shares.append(round(ranks.idle(options, "after the last round"), 3))
    if ranks.rank == 0:
        report(options, times, loads, shares)


def report(
    options: argparse.Namespace,
    times: dict[tuple[int, str, str], list[float]],
    loads: list[float],
    shares: list[float],
) -> None:
    """Write the figures and print the table."""
    rows = []
    for size in options.sizes:
        for name in COLLECTIVES:
            ways = {way: times[size, name, way] for way in WAYS}
            row: dict[str, Any] = {"collective": name, "bytes": size}
            row["microseconds"] = {way: [_short(1e6 * each) for each in median_interval(ways[way])] for way in WAYS}
            row["ratios"] = {
                f"{above}/{below}": [
                    _short(each)
                    for each in median_interval([a / b for a, b in zip(ways[above], ways[below], strict=True)])
                ]
                for above, below in RATIOS
            }
            rows.append(row)
    settings = {"communication": options.communication, "ranks": 2, "threads": 1, "rounds": options.rounds}
    load = {"load_averages": loads, "cores_of_others": shares, "cores_allowed": options.busy}
    write("collectives", {**settings, **load, "figures": "median, and bounds of its 95 % interval", "rows": rows})
    print(table(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds (median, and half the width of its interval in per cent), and the ratios, a line for each row."""
    names = [*WAYS, *(f"{above}/{below}" for above, below in RATIOS)]
    lines = [f"{'collective':15}{'bytes':>10}" + "".join(f"{name:>17}" for name in names)]
    for row in rows:
        cells = [_cell(row["microseconds"][way]) for way in WAYS]
        cells += [_cell(row["ratios"][f"{above}/{below}"]) for above, below in RATIOS]
        lines.append(f"{row['collective']:15}{row['bytes']:>10}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join([*lines, "microseconds, then ratios within a round; +- is half the 95 % interval of the median"])


def _cell(figures: list[float]) -> str:
    median, low, high = figures
    return f"{median:.4g} +-{100 * (high - low) / 2 / median:.0f}%" if median else "-"


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def main() -> None:
    """Start two ranks of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes, multiples of 4")
    parser.add_argument("--busy", type=float, default=0.5, help="cores that other processes may use")
    parser.add_argument("--communication", default="shm", help="the plugin that is compared with gloo")
    parser.add_argument("--root", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.root:
        worker(options)
        return
    require_idle(limit=options.busy)
    own = ["--root", str(os.getpid()), *sys.argv[1:]]
    command = [sys.executable, "-m", "polyscale", "run", "--nproc", "2", __file__, *own]
    sys.exit(subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
