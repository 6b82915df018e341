"""Memory of a device, as tests compare it."""

from __future__ import annotations

import gc
import time

PAUSE_S = 0.02
LONGEST_S = 10.0


def settled_memory(device: object) -> int:
    """Bytes in use on ``device``, once autograd's own thread has let go of what it worked on.

    That may be a moment after ``backward`` returns, so this waits until two looks agree.

    Args:
        device: as for ``torch.accelerator.memory_allocated``.

    Raises:
        RuntimeError: it still changes after seconds.
    """
    import torch

    gc.collect()
    deadline = time.monotonic() + LONGEST_S
    before, now = -1, torch.accelerator.memory_allocated(device)  # type: ignore[arg-type]
    while now != before:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the memory in use on {device} still changes after {LONGEST_S} s: {before}, {now} bytes"
            )
        time.sleep(PAUSE_S)
        before, now = now, torch.accelerator.memory_allocated(device)  # type: ignore[arg-type]
    return now
