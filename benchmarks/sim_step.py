"""A training step on the simulated device against the same step on the CPU: 17M-parameter GPT-2, fp32, batch 2 x 128.

    python benchmarks/sim_step.py [--pairs 40] [--optimizer fused|foreach]

Both are in one process and take turns; the figure is the median of the ratios of neighbouring steps, with its 95 %
interval. The losses of both are equal bit by bit, which is checked. Bound: at most 2.5.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from common import load_average, median_interval, write
from engine_step import MICRO, VOCABULARY, gpt2

LENGTH = 128


class Side:
    """The model and its optimizer on one device."""

    def __init__(self, device: str, optimizer: str) -> None:
        import torch

        self.device = device
        self.model = gpt2().to(device)
        chosen = {optimizer: True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, **chosen)

    def step(self, batch: Any) -> float:
        """One update; returns the loss, so that the device's work is done."""
        batch = batch.to(self.device)
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def main() -> None:
    """Take turns, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused")
    options = parser.parse_args()

    import torch

    from polyscale_sim import device

    torch.set_num_threads(1)
    device.register()
    load = load_average()
    sim, cpu = Side("sim", options.optimizer), Side("cpu", options.optimizer)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator) for _ in range(8)]

    ratios, seconds = [], {sim: [], cpu: []}
    for pair in range(options.pairs + 3):  # the first three warm up
        times, losses = {}, {}
        for side in (sim, cpu) if pair % 2 else (cpu, sim):
            started = time.perf_counter()
            losses[side] = side.step(batches[pair % len(batches)])
            times[side] = time.perf_counter() - started
        if losses[sim] != losses[cpu]:
            raise SystemExit(f"losses differ at step {pair}: {losses[sim]} on sim, {losses[cpu]} on cpu")
        if pair >= 3:
            ratios.append(times[sim] / times[cpu])
            for side, spent in times.items():
                seconds[side].append(spent)
    median, low, high = median_interval(ratios)
    write(
        f"sim_step_{options.optimizer}",
        {
            "load_average_before": load,
            "pairs": options.pairs,
            "sim_s": round(median_interval(seconds[sim])[0], 4),
            "cpu_s": round(median_interval(seconds[cpu])[0], 4),
            "ratio_median": round(median, 4),
            "ratio_interval_95": [round(low, 4), round(high, 4)],
            "sim_peak_bytes": torch.accelerator.max_memory_allocated(),
        },
    )


if __name__ == "__main__":
    main()
