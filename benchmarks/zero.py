"""ZeRO of polyscale beside torch's own and DeepSpeed: one training step of a 17M-parameter GPT-2, fp32, 2 ranks.

    python benchmarks/zero.py [--rounds 30] [--configs 'zero2-*' 'torch-*'] [--deepspeed-python PATH] [--sim]

Every configuration has two ranks of its own, one thread each, that sleep while others are measured; all take turns
within every round, on the same model, data, seed, optimizer and clipping. Their losses must agree step by step, or no
speed is printed. Figures go to the terminal, to results/zero.json and results/zero.png.

DeepSpeed is measured where it is installed (pip install 'polyscale[bench]'), or with the Python of another environment
that has it, torch and transformers: --deepspeed-python. It runs on gloo with torch's optimizer, and compiles nothing.

Ends with code 2 and the figure where other processes use the machine: before it starts, or between rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from common import BUSY_CORES, RESULTS, load_average, machine, require_idle
from zero_runs import pairs, rounds, summary
from zero_runs.configurations import CONFIGURATIONS, WORLD, Configuration, choose, why_skipped
from zero_runs.models import SHAPES
from zero_runs.rounds import LOSS_TOLERANCE, Plan, say

# Of both ranks of the 17M-parameter model, as measured (smaller for the tiny one).
PAIR_GIB = {"compute": 0.55, "polyscale": 1.0, "torch": 0.9, "deepspeed": 1.15}
TINY_GIB = 0.25


def main() -> None:
    """Measure, print, write."""
    options = _options()
    if options.nursery:
        from zero_runs.nursery import run

        run(**json.loads(options.nursery))
        return
    signal.signal(signal.SIGTERM, _terminated)
    try:
        _run(options)
    except (rounds.LossesDiffer, pairs.RankDied, ValueError) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; all ranks have been ended", 130)


def _run(options: argparse.Namespace) -> None:
    load = load_average()
    chosen, skipped = _chosen(options)
    require_idle(limit=options.busy_limit)
    _require_memory(chosen, options.model)
    plan = Plan(options.warm_rounds, options.rounds, options.steps_per_round, options.busy_limit)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-")))
        nurseries = _nurseries(stack, chosen, folder, options)
        running = []
        for number, configuration in enumerate(chosen, start=1):
            running.append(_start(stack, configuration, nurseries, folder, options))
            say(f"started {number} of {len(chosen)}: {configuration.name}")
        samples, state = rounds.measure(running, plan)
        say("ending the ranks")
        for pair in running:
            pair.close()
        peaks = _peaks(stack, chosen, nurseries, folder, options) if options.sim else {}
    about = running[0].about
    table = summary.summarize(chosen, samples, 4 * about["parameters"], peaks)
    furthest = rounds.furthest_loss(samples)
    print("\n".join(summary.lines(table)))
    print(
        f"losses of all that train agree to {furthest:.1e} of their size at every step; {LOSS_TOLERANCE:g} is allowed"
    )
    figures = {
        "load_average_before": load,
        "model": {"name": options.model, **about["shape"], "parameters": about["parameters"]},
        "world": WORLD,
        "plan": asdict(plan),
        "tuned_peers": options.tuned_peers,
        "versions": {  # DeepSpeed may run another Python
            "deepspeed" if pair.configuration.kind == "deepspeed" else "here": pair.about["versions"]
            for pair in running
        },
        "other_processes_cores": state.busy,
        "load_average": state.load,
        "sleeping_ranks_cores": state.asleep,
        "loss_tolerance": LOSS_TOLERANCE,
        "losses_apart": furthest,
        "skipped": skipped,
        "configurations": table,
    }
    _write(figures, options)


def _chosen(options: argparse.Namespace) -> tuple[list[Configuration], dict[str, str]]:
    """Configurations that can run here, and why the others cannot."""
    wanted = choose(options.configs)
    without = ""
    if any(each.kind == "deepspeed" for each in wanted):
        without = pairs.python_lacks(options.deepspeed_python, "deepspeed")
    skipped = {each.name: why for each in wanted if (why := why_skipped(each, without_deepspeed=without))}
    for name, why in skipped.items():
        say(f"skipped {name}: {why}")
    return [each for each in wanted if each.name not in skipped], skipped


def _nurseries(
    stack: contextlib.ExitStack, chosen: list[Configuration], folder: Path, options: argparse.Namespace
) -> dict[bool, pairs.Nursery]:
    """What forks ranks, by whether they are DeepSpeed's: those may run another Python."""
    found = {}
    for foreign in {each.kind == "deepspeed" for each in chosen}:
        python = options.deepspeed_python if foreign else sys.executable
        found[foreign] = pairs.Nursery(python, ["deepspeed"] if foreign else ["polyscale"], folder)
        stack.callback(found[foreign].kill)
    for nursery in found.values():
        nursery.wait_ready()
    return found


def _start(
    stack: contextlib.ExitStack,
    configuration: Configuration,
    nurseries: dict[bool, pairs.Nursery],
    folder: Path,
    options: argparse.Namespace,
    *,
    device: str = "cpu",
) -> pairs.Pair:
    """Start the ranks of one configuration and wait for them; they are ended with ``stack`` at the latest."""
    peer = configuration.kind in ("torch", "deepspeed")
    tuned = configuration.tuned or (peer and options.tuned_peers)
    nursery = nurseries[configuration.kind == "deepspeed"]
    pair = pairs.Pair(configuration, options.model, nursery, folder, device=device, tuned=tuned)
    stack.callback(pair.kill)
    pair.wait_started()
    return pair


def _peaks(
    stack: contextlib.ExitStack,
    chosen: list[Configuration],
    nurseries: dict[bool, pairs.Nursery],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, dict[str, int] | str]:
    """Bytes on the simulated device, at rest and at the peak of a step: the most of both ranks; or why not."""
    found: dict[str, dict[str, int] | str] = {}
    for configuration in chosen:
        if why := configuration.why_not_simulated:
            found[configuration.name] = why
            continue
        say(f"simulated device: {configuration.name}; the very first start compiles the device")
        pair = _start(stack, configuration, nurseries, folder, options, device="sim")
        answers = pair.ask("peak")
        pair.close()
        found[configuration.name] = {key: max(answer[key] for answer in answers) for key in ("rest", "peak")}
    return found


def _require_memory(chosen: list[Configuration], model: str) -> None:
    """Refuse what would not fit: ranks that are swapped out tell nothing."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")), None)
    wanted = sum(TINY_GIB if model == "tiny" else PAIR_GIB[each.kind] for each in chosen)
    if free is not None and wanted > free:
        raise ValueError(
            f"{len(chosen)} configurations need about {wanted:.1f} GiB, and {free:.1f} GiB are free. Choose fewer with "
            "--configs; compute is measured with each choice, so ratios to it can be compared."
        )


def _write(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the figures with the machine as JSON, and the picture beside it where matplotlib is installed."""
    name = "zero" if options.model == "17m" else f"zero_{options.model}"
    path = options.json or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    print(f"written: {path}")
    shape = figures["model"]
    title = f"GPT-2, {shape['parameters'] / 1e6:.3g}M parameters, fp32, {WORLD} ranks, {options.rounds} rounds"
    try:
        from zero_runs.picture import draw

        draw(figures["configurations"], title, path.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'polyscale[bench]')")
        return
    print(f"written: {path.with_suffix('.png')}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"configurations: {', '.join(each.name for each in CONFIGURATIONS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=_positive, default=30, help="measured rounds (default 30)")
    add("--warm-rounds", type=_positive, default=3, help="rounds before them, not measured (default 3)")
    add("--steps-per-round", type=_positive, default=1, help="steps of one turn, of which the mean counts (default 1)")
    add("--configs", nargs="+", default=[], metavar="GLOB", help="which (default all); compute is always with them")
    add("--model", choices=list(SHAPES), default="17m", help="17m (default), or tiny for trying")
    add(
        "--deepspeed-python",
        default=sys.executable,
        metavar="PATH",
        help="Python that has DeepSpeed (default this one)",
    )
    add("--tuned-peers", action="store_true", help="let glibc keep freed memory under torch and DeepSpeed too")
    add("--sim", action="store_true", help="also tell peak bytes on the simulated device, in runs of their own")
    add("--json", type=Path, metavar="PATH", help="where the figures go, the picture beside them (default results/)")
    limit = f"cores that others may use (default {BUSY_CORES}); with more, figures are worth nothing"
    add("--busy-limit", type=float, default=BUSY_CORES, metavar="CORES", help=limit)
    add("--nursery", help=argparse.SUPPRESS)
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _terminated(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
