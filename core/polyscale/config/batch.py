"""The batch triangle: train_batch_size = micro-batch x accumulation x data-parallel ranks.

Notable: any one or two of the three give the rest. With none given the micro-batch is 1: a loop that feeds the engine
itself needs no number (DeepSpeed refuses this).
"""

from __future__ import annotations

from dataclasses import dataclass

from polyscale.config.errors import BatchError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of one update (``train``), of one forward on one rank (``micro``), and micro-steps of one update."""

    train: int
    micro: int
    accumulation: int


def batch_numbers(*, train: int | None, micro: int | None, accumulation: int | None, dp_world: int) -> Batch:
    """Complete and check the triangle.

    Raises:
        BatchError: the numbers do not multiply.
    """
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * dp_world, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        _divide(train, {ACCUMULATION: accumulation}, dp_world, missing=MICRO)
        return Batch(train, train // (accumulation * dp_world), accumulation)
    if accumulation is None:
        _divide(train, {MICRO: micro}, dp_world, missing=ACCUMULATION)
        return Batch(train, micro, train // (micro * dp_world))
    if train != micro * accumulation * dp_world:
        raise _does_not_multiply(train, micro, accumulation, dp_world)
    return Batch(train, micro, accumulation)


def _divide(train: int, known: dict[str, int], dp_world: int, *, missing: str) -> None:
    """Check that ``train`` is a multiple of what is known, so that the ``missing`` number is whole."""
    ((name, value),) = known.items()
    portion = value * dp_world
    if train % portion == 0:
        return
    nearest = max(1, round(train / portion)) * portion
    raise BatchError(
        f"{TRAIN} {train}, {name} {value}, data-parallel ranks {dp_world}",
        why=f"{missing} would be {train} / ({value} x {dp_world}) = {train / portion:g}, which is not a whole number",
        fix=f"Nearest that multiplies: {TRAIN} {nearest}, with {missing} {nearest // portion}",
    )


def _does_not_multiply(train: int, micro: int, accumulation: int, dp_world: int) -> BatchError:
    product = micro * accumulation * dp_world
    ways = [f"{TRAIN} {product}"]
    if train % (micro * dp_world) == 0:
        ways.append(f"{ACCUMULATION} {train // (micro * dp_world)}")
    if train % (accumulation * dp_world) == 0:
        ways.append(f"{MICRO} {train // (accumulation * dp_world)}")
    return BatchError(
        f"{TRAIN} {train}, {MICRO} {micro}, {ACCUMULATION} {accumulation}, data-parallel ranks {dp_world}",
        why=f"{micro} x {accumulation} x {dp_world} = {product}, not {train}",
        fix=f"Nearest that multiplies: {', or '.join(ways)}; or leave one of the three out",
    )
