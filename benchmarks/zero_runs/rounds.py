"""Who is measured when: warm-up rounds, measured rounds, then one step that is counted.

Notable: within a round every configuration has its turn while all others sleep; each round begins one further, and
every other one goes backwards, so that no configuration always follows the same one. The time of a step is from the
first rank's start to the last rank's end, on the host's one clock.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from common import load_average, require_idle

from zero_runs import memory, pairs, traffic
from zero_runs.configurations import COMPUTE, WORLD

LOSS_TOLERANCE = 2e-5
LEFT_BEHIND_S = 0.01


class LossesDiffer(Exception):
    """Configurations that should do the same do not: their speeds cannot be compared."""


@dataclass
class Samples:
    """What one configuration gave.

    Attributes:
        seconds: of a step, by measured round.
        wire: bytes that the loopback interface carried in a step, per rank, by measured round.
        left_s: processor seconds used in the 30 ms after a step has returned, by measured round.
        losses: by rank, of every step from the first.
        memory: of both ranks after the last measured step.
        counted: collectives of one step, on rank 0.
    """

    seconds: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    memory: dict[str, int] = field(default_factory=dict)
    counted: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        warm: rounds before the measured ones.
        rounds: measured rounds.
        steps: consecutive steps of one turn; the sample is their mean.
        busy_limit: cores that other processes may use.
    """

    warm: int
    rounds: int
    steps: int
    busy_limit: float


@dataclass
class Machine:
    """What others took of the machine, by measured round.

    Attributes:
        busy: cores that other processes used, before the round.
        load: load average of the last minute.
        asleep: cores that all our ranks together used while none was asked anything, before the round.
    """

    busy: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    asleep: list[float] = field(default_factory=list)


def measure(running: list[pairs.Pair], plan: Plan) -> tuple[dict[str, Samples], Machine]:
    """Run all rounds.

    Raises:
        SystemExit: (2) other processes use the machine.
        LossesDiffer: see the class.
        pairs.RankDied: a rank ended.
    """
    samples = {pair.configuration.name: Samples() for pair in running}
    machine = Machine()
    pids = [pid for pair in running for pid in pair.pids]
    for number in range(plan.warm + plan.rounds):
        measured = number - plan.warm + 1
        before, at = memory.cpu_seconds(pids), time.monotonic()
        busy = require_idle(pids, limit=plan.busy_limit, seconds=0.5)
        asleep = (memory.cpu_seconds(pids) - before) / (time.monotonic() - at)
        started = time.monotonic()
        for pair in _order(running, number):
            _turn(pair, samples[pair.configuration.name], plan.steps, measured=measured > 0)
        _check_losses(samples)
        if measured > 0:
            machine.busy.append(round(busy, 3))
            machine.asleep.append(round(asleep, 3))
            machine.load.append(load_average())
        label = f"round {measured} of {plan.rounds}" if measured > 0 else f"warm-up {number + 1} of {plan.warm}"
        say(
            f"{label}: {time.monotonic() - started:.1f} s; other processes used {busy:.2f} cores, load average "
            f"{load_average():.2f}"
        )
    for pair in running:
        entry = samples[pair.configuration.name]
        entry.memory = memory.used(pair.pids)
    for pair in running:
        say(f"counting the collectives of {pair.configuration.name}")
        _count(pair, samples[pair.configuration.name])
    _check_losses(samples)
    return samples, machine


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def _order(running: list[pairs.Pair], number: int) -> list[pairs.Pair]:
    shift = number % len(running)
    turned = running[shift:] + running[:shift]
    return turned[::-1] if number % 2 else turned


def _turn(pair: pairs.Pair, entry: Samples, steps: int, *, measured: bool) -> None:
    sent = traffic.loopback_bytes()
    answers = pair.ask("steps", count=steps)
    sent = traffic.loopback_bytes() - sent
    for rank, answer in enumerate(answers):
        entry.losses[rank] += answer["losses"]
    if measured:
        whole = max(answer["ended"] for answer in answers) - min(answer["started"] for answer in answers)
        entry.seconds.append(whole / steps)
        entry.wire.append(sent / WORLD / steps)
        entry.left_s.append(sum(answer["left_s"] for answer in answers))


def _count(pair: pairs.Pair, entry: Samples) -> None:
    answers = pair.ask("count")
    for rank, answer in enumerate(answers):
        entry.losses[rank].append(answer.pop("loss"))
    entry.counted = answers[0]


def _check_losses(samples: dict[str, Samples]) -> None:
    """Compare the losses of all that train, step by step and rank by rank, with the median of them.

    Raises:
        LossesDiffer: one is further from the median than the tolerance, or not a number.
    """
    odd: dict[str, str] = {}
    trained = {name: entry for name, entry in samples.items() if not name.startswith(COMPUTE)}
    for rank in range(WORLD):
        for step, values in enumerate(zip(*(entry.losses[rank] for entry in trained.values()), strict=True)):
            median = statistics.median_low(values)
            for name, value in zip(trained, values, strict=True):
                apart = abs(value - median) / abs(median)
                if not apart <= LOSS_TOLERANCE or math.isnan(median):
                    said = f"{name}: {value:.7g} on rank {rank} at step {step}; the median of all is {median:.7g}"
                    odd.setdefault(name, said)
    if odd:
        lines = "\n".join(f"  {said}" for said in odd.values())
        raise LossesDiffer(
            f"refused: losses differ by more than {LOSS_TOLERANCE:g} of their size, so speeds cannot be compared:\n"
            f"{lines}\n  (of {', '.join(trained)})"
        )


def furthest_loss(samples: dict[str, Samples]) -> float:
    """The largest distance of a loss from the median, relative."""
    trained = [entry for name, entry in samples.items() if not name.startswith(COMPUTE)]
    found: dict[str, float] = defaultdict(float)
    for rank in range(WORLD):
        for values in zip(*(entry.losses[rank] for entry in trained), strict=True):
            median = statistics.median_low(values)
            found["most"] = max(found["most"], *(abs(value - median) / abs(median) for value in values))
    return found["most"]
