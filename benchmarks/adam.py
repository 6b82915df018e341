"""Adam by the op ``fused_adam_`` against ``torch.optim.AdamW(fused=True)``, on one flat tensor.

    python benchmarks/adam.py [--elements 100000000] [--rounds 15] [--threads N]

All sides work on the same buffers and take turns; figures are medians of the ratios within a round, with their 95 %
interval. Bytes are those that an algorithm names (28 per element for fp32: parameter and moments read and written,
gradient read), not those that caches add.

- ``fp32``: time of the op / time of torch's step. Bound: at most 1.03.
- ``copy_add``: the op's bytes per second / those of a copy-add loop ``b[i] = a[i] + b[i]`` that moves as many bytes (12
  per element); of torch's loop and the own one the faster counts, round by round. Bound: at least 0.95.
- ``bf16``: (torch's step, before it the cast of a bf16 gradient to fp32, ``grad.float()``, and behind it that of the
  parameter to bf16, ``param.bfloat16()``) / (the op on the bf16 gradient with its bf16 copy). Bound: at least 3. Most
  of it is the memory that the casts ask the system for; ``bf16_kept`` is the same with casts into kept tensors, where
  what is left is the share of bytes (46 to 28, with the reads that writes cause).
- ``error``: distance from torch's fused step in fp64 after 1000 steps with random gradients, the op's / that of torch's
  fused step in fp32. Bound: at most 2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from common import load_average, median_interval, write

LR, DECAY = 1e-3, 0.01
BYTES = 28  # per element of an fp32 step


class Buffers:
    """The tensors of all sides, and what each does with them."""

    def __init__(self, elements: int) -> None:
        import torch

        from polyscale import ops

        self.adam, self.add = ops.use("fused_adam_", "cpu"), ops.use("add_scaled_", "cpu")
        self.param = torch.nn.Parameter(torch.randn(elements))
        self.grad, self.narrow = torch.randn(elements), torch.randn(elements).bfloat16()
        self.copy = torch.zeros(elements, dtype=torch.bfloat16)
        self.cast: Any = None
        self.optimizer = torch.optim.AdamW([self.param], lr=LR, weight_decay=DECAY, fused=True)
        self.param.grad = self.grad
        self.optimizer.step()
        state = self.optimizer.state[self.param]
        self.moments = state["exp_avg"], state["exp_avg_sq"]
        length = elements * BYTES // 12
        self.a, self.b = torch.randn(length), torch.randn(length)

    def sides(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by name."""
        param = self.param.detach()
        settings = {"lr": LR, "weight_decay": DECAY, "step": 100}

        def torch_with_casts() -> None:
            self.param.grad = self.narrow.float()
            self.optimizer.step()
            self.cast = param.bfloat16()
            self.param.grad = self.grad

        def torch_with_kept_casts() -> None:
            self.grad.copy_(self.narrow)
            self.optimizer.step()
            self.copy.copy_(param)

        return {
            "torch": self.optimizer.step,
            "op": lambda: self.adam(param, *self.moments, self.grad, **settings),
            "torch_with_casts": torch_with_casts,
            "torch_with_kept_casts": torch_with_kept_casts,
            "op_bf16": lambda: self.adam(param, *self.moments, self.narrow, self.copy, **settings),
            "torch_copy_add": lambda: self.b.add_(self.a),
            "own_copy_add": lambda: self.add(self.b, self.a),
        }


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def rounds_of(sides: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Seconds of each side in ``count`` rounds, every second of them in the reverse order; two more warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(count + 2):
        for name in list(sides) if number % 2 else reversed(list(sides)):
            took = timed(sides[name])
            if number >= 2:
                seconds[name].append(took)
    return seconds


def errors(elements: int = 100_000, steps: int = 1000) -> dict[str, float]:
    """Largest and mean error after ``steps`` steps, the op's / torch's."""
    import torch

    from polyscale import ops

    adam = ops.use("fused_adam_", "cpu")
    start = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    right, theirs = torch.nn.Parameter(start.double()), torch.nn.Parameter(start.clone())
    optimizers = [torch.optim.AdamW([param], lr=LR, weight_decay=DECAY, fused=True) for param in (right, theirs)]
    own = [start.clone(), torch.zeros(elements), torch.zeros(elements)]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        theirs.grad = torch.randn(elements, generator=generator)
        right.grad = theirs.grad.double()
        for optimizer in optimizers:
            optimizer.step()
        adam(*own, theirs.grad, lr=LR, weight_decay=DECAY, step=step)
    distances = [(found.detach().double() - right.detach()).abs() for found in (own[0], theirs)]
    return {
        "largest": round((distances[0].max() / distances[1].max()).item(), 4),
        "mean": round((distances[0].mean() / distances[1].mean()).item(), 4),
    }


def figure(ratios: list[float]) -> dict[str, Any]:
    """Median of ``ratios`` and its interval."""
    median, low, high = median_interval(ratios)
    return {"median": round(median, 4), "interval_95": [round(low, 4), round(high, 4)]}


def main() -> None:
    """Measure, print and write."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = load_average()

    from polyscale import ops
    from polyscale_cpu_ops.library import MODULE

    extension = ops.load_module(MODULE)
    seconds = rounds_of(Buffers(options.elements).sides(), options.rounds)

    def ratios(above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]

    loops = map(min, seconds["torch_copy_add"], seconds["own_copy_add"])
    length = options.elements * BYTES // 12 * 12
    bandwidths = [
        (options.elements * BYTES / op) / (length / loop) for op, loop in zip(seconds["op"], loops, strict=True)
    ]
    write(
        "adam" if options.threads > 1 else "adam_one_thread",
        {
            "load_average_before": load,
            "elements": options.elements,
            "rounds": options.rounds,
            "threads": options.threads,
            "instruction_set": extension.instruction_set(),
            "fp32_op_per_torch": figure(ratios("op", "torch")),
            "copy_add_bandwidth_of_op_per_loop": figure(bandwidths),
            "bf16_torch_with_casts_per_op": figure(ratios("torch_with_casts", "op_bf16")),
            "bf16_kept_torch_with_casts_per_op": figure(ratios("torch_with_kept_casts", "op_bf16")),
            "error_of_op_per_torch": errors(),
            "median_ms": {name: round(median_interval(each)[0] * 1e3, 2) for name, each in seconds.items()},
            "fp32_op_gb_per_s": round(options.elements * BYTES / median_interval(seconds["op"])[0] / 1e9, 2),
        },
    )


if __name__ == "__main__":
    main()
