"""An engine step against the same step by hand on ``fully_shard``: 17M-parameter GPT-2, fp32, 2 ranks.

    python benchmarks/engine_step.py [--pairs 40] [--stage 2|3] [--clip 1.0]

Both are built in the same ranks and take turns; the figure is the median of the ratios of neighbouring steps, with its
95 % interval. Bound: at most 1.03.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from common import load_average, median_interval, write

MICRO, LENGTH, VOCABULARY = 2, 128, 8192


def gpt2() -> Any:
    """4 layers, width 512, 8 heads, vocabulary 8192, no dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=512, n_head=8, vocab_size=VOCABULARY, n_positions=256, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class ByEngine:
    """The step through the engine."""

    def __init__(self, stage: int, clip: float) -> None:
        import polyscale

        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": clip,
            "backends": {"data_parallel": "fsdp2"},
        }
        self.engine = polyscale.initialize(gpt2(), config=config)

    def step(self, batch: Any) -> None:
        """One update."""
        loss = self.engine(input_ids=batch, labels=batch).loss
        self.engine.backward(loss)
        self.engine.step()


class ByHand:
    """The same step on ``fully_shard``."""

    def __init__(self, stage: int, clip: float) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        self.model, self.clip = gpt2(), clip
        for block in self.model.transformer.h:
            fully_shard(block, reshard_after_forward=stage == 3)
        fully_shard(self.model, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(self, batch: Any) -> None:
        """One update."""
        import torch

        self.model(input_ids=batch, labels=batch).loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def worker(options: argparse.Namespace) -> None:
    """One rank: take turns, and write the figures on rank 0."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    load = load_average()
    engine, hand = ByEngine(options.stage, options.clip), ByHand(options.stage, options.clip)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator) for _ in range(8)]

    def timed(side: ByEngine | ByHand, index: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        side.step(batches[index % len(batches)])
        dist.barrier()
        return time.perf_counter() - started

    ratios, seconds = [], {"engine": [], "hand": []}
    for pair in range(options.pairs + 3):  # the first three warm up
        order = (engine, hand) if pair % 2 else (hand, engine)
        times = {side: timed(side, pair) for side in order}
        if pair >= 3:
            ratios.append(times[engine] / times[hand])
            seconds["engine"].append(times[engine])
            seconds["hand"].append(times[hand])
    if dist.get_rank() == 0:
        median, low, high = median_interval(ratios)
        write(
            f"engine_step_stage{options.stage}_clip{options.clip:g}",
            {
                "load_average_before": load,
                "pairs": options.pairs,
                "engine_s": round(median_interval(seconds["engine"])[0], 4),
                "hand_s": round(median_interval(seconds["hand"])[0], 4),
                "ratio_median": round(median, 4),
                "ratio_interval_95": [round(low, 4), round(high, 4)],
            },
        )
    engine.engine.close()


def main() -> None:
    """Start two ranks of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--stage", type=int, default=2, choices=(2, 3))
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    command = [sys.executable, "-m", "polyscale", "run", "--nproc", "2", __file__, "--worker", *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
