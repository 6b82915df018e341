"""``make demo``: trains a small GPT-2 on several ranks, loads its checkpoint in a new process with one, and goes on.

Notable: what trains is ``docs/examples/train_gpt.py``, unchanged, under ``scale run``. This file chooses its options,
draws the progress bar (stderr), counts the baselines, has the outcome judged, and writes ``result.json`` and
``loss.png``; the last line on stdout is the result. It exits with 1 when what was promised was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcome import Curve, judge, plot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyscale.interfaces.accelerator import Accelerator

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "train_gpt.py"
OUT = ROOT / "runs" / "demo"
WRITTEN = ("checkpoint", "config.json", "loss.png", "result.json", "tokenizer.json", "train.log")
VOCABULARY, LENGTH, BATCH, STAGE = 1024, 128, 8, 2
MODEL = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": LENGTH, "n_layer": 4, "n_embd": 160, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


class DemoError(Exception):
    """Something that people can set right."""


@dataclass(frozen=True)
class Options:
    """What is run."""

    out: Path
    steps: int
    more: int
    validation: int
    goal: str


def main() -> int:
    """Run the demo; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return demo(options())
    except KeyboardInterrupt:
        print("Interrupted; the ranks have ended.", file=sys.stderr)
        return 130
    except DemoError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Error: {error.filename or 'A file'}: {error.strerror or error}. Is the disk full?", file=sys.stderr)
        return 2


def goal(text: str) -> str:
    """A goal that can be judged."""
    if text not in ("bigram", "none"):
        try:
            float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is none; valid are a number, 'bigram' and 'none'") from None
    return text


def options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2, save it, load it elsewhere, go on.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="updates before the checkpoint (%(default)s)")
    parser.add_argument("--more", type=int, default=20, help="updates after it, on one rank (%(default)s)")
    parser.add_argument("--validation", type=int, default=128, help="samples to validate with (%(default)s)")
    parser.add_argument(
        "--goal", default="5.0", type=goal, help="validation loss to get below: a number, or 'bigram', or 'none'"
    )
    args = parser.parse_args(argv)
    return Options(args.out, args.steps, args.more, args.validation, args.goal)


def demo(options: Options) -> int:
    """Train, resume, judge and report; returns 0 when everything promised was met, else 1."""
    from bar import Bar

    started = time.monotonic()
    nproc = asked_nproc()
    accelerator = find_accelerator()
    nproc = nproc or default_nproc(accelerator)
    clear(options.out)
    curve, resumed = Curve(), Curve()
    shared = ["--out", str(options.out), "--model", json.dumps(MODEL), "--length", str(LENGTH)]
    shared += ["--validation", str(options.validation), *precision(accelerator, options.out)]
    steps = options.steps + options.more
    with Bar(f"{nproc} x {accelerator.name}, ZeRO stage {STAGE}", options.steps) as bar:
        launch([*shared, "--steps", str(options.steps)], nproc, options.out, curve, bar)
    with Bar(f"resumed on 1 x {accelerator.name}", steps, done=options.steps) as bar:
        launch([*shared, "--steps", str(steps), "--resume"], 1, options.out, resumed, bar)
    unigram, bigram = baselines(options)
    result = {
        "val_loss_first": round(curve.validation[0][1], 6),
        "val_loss_last": round(curve.validation[-1][1], 6),
        "unigram_loss": round(unigram, 6),
        "bigram_loss": round(bigram, 6),
        "tokens_per_s": round(curve.tokens_per_s),
        "world_size": nproc,
        "stage": STAGE,
        "resumed_val_loss": round(resumed.validation[0][1], 6),
        "seconds": round(time.monotonic() - started, 1),
    }
    plot(options.out / "loss.png", curve, resumed, unigram, bigram)
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    missed = judge(result, options.goal, vocabulary=VOCABULARY)
    report(result, resumed, missed, options.out)
    print(json.dumps(result), flush=True)
    return 1 if missed else 0


def asked_nproc() -> int | None:
    """``DEMO_NPROC``, or None where it is not set."""
    text = os.environ.get("DEMO_NPROC", "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise DemoError(f"DEMO_NPROC={text!r}. It is the number of ranks. Give 1 or more, or leave it out.")
    return int(text)


def find_accelerator() -> Accelerator:
    """What the ranks will compute on: ``DEMO_ACCELERATOR``, or what is found."""
    from polyscale.discovery import select_accelerator
    from polyscale.errors import PolyscaleError

    name = os.environ.get("DEMO_ACCELERATOR")
    if name:
        os.environ["POLYSCALE_ACCELERATOR"] = name
    try:
        return select_accelerator()
    except PolyscaleError as error:
        raise DemoError(str(error)) from None


def default_nproc(accelerator: Accelerator) -> int:
    """Two ranks on the CPU; one for each device of an accelerator, two at most."""
    return 2 if accelerator.device_type == "cpu" else min(2, accelerator.device_count())


def precision(accelerator: Accelerator, out: Path) -> list[str]:
    """Options of the example: fp32 on the CPU, bf16 on a device that has it."""
    if accelerator.device_type == "cpu" or "bf16" not in accelerator.capabilities.dtypes:
        return ["--stage", str(STAGE), "--batch", str(BATCH)]
    config = example().configuration(STAGE, BATCH) | {"bf16": {"enabled": True}}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return ["--config", str(out / "config.json")]


def clear(out: Path) -> None:
    """Make the folder, and remove what an earlier demo wrote there."""
    out.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def launch(arguments: list[str], nproc: int, out: Path, curve: Curve, bar: Any) -> None:
    """Run the example, filling ``curve`` and moving the bar."""
    from ranks import RunFailed, run

    def take(record: dict[str, Any]) -> None:
        curve.add(record)
        bar.move(record)

    log = out / "train.log"
    try:
        run(EXAMPLE, arguments, nproc=nproc, log=log, on_record=take, on_error=bar.say)
    except RunFailed as error:
        if error.code == 130:
            raise KeyboardInterrupt from None
        raise DemoError(f"{error}. What they said is above, and in {log}.") from None
    if not curve.validation or not curve.training:
        raise DemoError(f"The ranks ended without a loss. What they said is in {log}.")


def example() -> Any:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_gpt

    return train_gpt


def baselines(options: Options) -> tuple[float, float]:
    """Unigram and bigram losses of the very samples that the example validates with."""
    from pydoc_data.topics import topics

    import torch
    from baselines import losses
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("\n\n".join(topics.values())).ids)
    rows = torch.stack(torch.split(ids, LENGTH)[:-1])
    return losses(rows[: -options.validation], rows[-options.validation :], VOCABULARY)


def report(result: dict[str, Any], resumed: Curve, missed: list[str], out: Path) -> None:
    """Say the outcome to people."""
    print(
        f"Validation loss {result['val_loss_first']:.3f} -> {result['val_loss_last']:.3f} "
        f"(unigram {result['unigram_loss']:.3f}, bigram {result['bigram_loss']:.3f}); "
        f"loaded in a new process: {result['resumed_val_loss']:.3f}\n"
        f"It writes: {resumed.sentence!r}\n"
        f"Written: {', '.join(name for name in WRITTEN if (out / name).exists())} in {out}",
        file=sys.stderr,
    )
    for text in missed:
        print(f"Missed: {text}.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
