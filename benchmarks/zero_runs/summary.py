"""Medians, ratios and the table.

Notable: a ratio is formed within each round and its median taken over rounds, so that what slows a whole round down
falls out; its interval is the 95 % bootstrap interval of that median.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import median_interval

from zero_runs.configurations import COMPUTE, Configuration
from zero_runs.rounds import LEFT_BEHIND_S, Samples

_MB, _MIB = 1e6, 2**20


def summarize(
    chosen: list[Configuration], samples: dict[str, Samples], parameter_bytes: int, peaks: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Figures by configuration; ``peaks`` holds bytes on the simulated device by configuration, or why not."""
    table: dict[str, dict[str, Any]] = {}
    for configuration in chosen:
        name, entry = configuration.name, samples[configuration.name]
        quartiles = _quartiles(entry.seconds)
        table[name] = {
            "kind": configuration.kind,
            "stage": configuration.stage,
            "step_s": statistics.median(entry.seconds),
            "quartiles_s": quartiles,
            "to_compute": _ratio(entry, samples.get(COMPUTE)),
            "torch_peer": configuration.torch_peer,
            "to_torch": _ratio(entry, samples.get(configuration.torch_peer)),
            "deepspeed_peer": configuration.deepspeed_peer,
            "to_deepspeed": _ratio(entry, samples.get(configuration.deepspeed_peer)),
            "sent_bytes": entry.counted["sent"],
            "least_bytes": configuration.least_bytes(parameter_bytes),
            "wire_bytes": statistics.median(entry.wire),
            "collectives": entry.counted["collectives"],
            "memory": entry.memory,
            "left_behind_s": statistics.median(entry.left_s),
            "device": peaks.get(name),
            "samples": {"seconds": entry.seconds, "wire_bytes": entry.wire, "left_behind_s": entry.left_s},
            "losses": entry.losses,
        }
    return table


def lines(table: dict[str, dict[str, Any]]) -> list[str]:
    """The table as text, with what its columns mean."""
    rows = [_HEADER, *([name, *_cells(row)] for name, row in table.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    late = [
        f"{name} goes on after its step has returned: {row['left_behind_s'] * 1e3:.0f} ms of processor time that are "
        "in no figure"
        for name, row in table.items()
        if row["left_behind_s"] > LEFT_BEHIND_S
    ]
    return [*text, "", *_LEGEND, *late]


_HEADER = [
    "configuration", "step ms", "quartiles", "/ compute", "95 %", "/ torch", "95 %", "/ DeepSpeed", "95 %",
    "sent MB", "least MB", "wire MB", "data MiB", "PSS MiB", "device MiB",
]  # fmt: skip
_LEGEND = (
    "Both ranks at once, from the first start to the last end; ratios are medians of those within each round.",
    "/ torch: DDP at stage 0, fully_shard without reshard at 1 and 2, with it at 3. / DeepSpeed: its same stage.",
    "sent: by one rank in one step, from the collectives called; least: a ring's (gloo reduce-scatters by all-reduce);",
    "wire: what the loopback interface carried, per rank. data: both ranks' memory after a step without files (PSS).",
    "device: the most of either rank's simulated device in a step (--sim).",
)


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["quartiles_s"]
    cells = [f"{row['step_s'] * 1e3:.1f}", f"{low * 1e3:.1f}-{high * 1e3:.1f}"]
    for key in ("to_compute", "to_torch", "to_deepspeed"):
        ratio = row[key]
        cells += ["-", "-"] if ratio is None else [f"{ratio[0]:.3f}", f"{ratio[1]:.3f}-{ratio[2]:.3f}"]
    least, device = row["least_bytes"], row["device"]
    cells += [
        f"{row['sent_bytes'] / _MB:.1f}",
        "-" if least is None else f"{least / _MB:.1f}",
        f"{row['wire_bytes'] / _MB:.1f}",
    ]
    cells += [f"{row['memory'][key] / _MIB:.0f}" for key in ("data", "pss")]
    return [*cells, f"{device['peak'] / _MIB:.1f}" if isinstance(device, dict) else "-"]


def _ratio(entry: Samples, other: Samples | None) -> tuple[float, float, float] | None:
    if other is None:
        return None
    return median_interval([mine / theirs for mine, theirs in zip(entry.seconds, other.seconds, strict=True)])


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
