"""One rank whose memory runs out, or whose device dies: nobody waits for ever, and everybody says why."""

import pytest
import torch

import polyscale
from polyscale.testing import ranks, ranks_once, tiny_gpt2


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "sim"},
    }


def _train(stage, before_step, steps=3):
    torch.manual_seed(0)
    engine = polyscale.initialize(tiny_gpt2(layers=2, width=8, vocabulary=16, positions=8), config=_config(stage))
    tokens = torch.randint(0, 16, (1, 8))
    for step in range(steps):
        before_step(engine, step)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


def _run_out_on_rank_1(stage, k):
    from polyscale_sim import faults

    def fault(engine, step):
        if step == 1 and engine.topology.rank == 1:
            faults.fail_allocation(k, engine.device.index)

    _train(stage, fault)


@pytest.mark.parametrize(("stage", "k"), [pytest.param(0, 150, marks=pytest.mark.long), (3, 30)])
def test_a_rank_that_runs_out_of_memory_ends_the_others_with_the_reason(stage, k):
    healthy, failed = ranks_once(2, _run_out_on_rank_1, stage, k, timeout=100, env={"POLYSCALE_TIMEOUT": "120"})
    assert not healthy.timed_out and not failed.timed_out
    assert failed.returncode == 1
    assert "OutOfMemory" in failed.stderr
    assert "Out of memory on sim:1 (rank 1)" in failed.stderr and "parameters" in failed.stderr
    assert healthy.returncode in (1, 75)
    assert "rank 1" in healthy.stderr and "out of memory" in healthy.stderr
    assert healthy.seconds - failed.seconds < 20


def _kill_the_device_of_rank_1(stage):
    from polyscale_sim import faults

    def fault(engine, step):
        if step == 1 and engine.topology.rank == 1:
            faults.kill_device(engine.device.index)

    _train(stage, fault)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_device_that_dies_is_named_on_every_rank_and_the_process_ends(stage):
    healthy, failed = ranks_once(2, _kill_the_device_of_rank_1, stage, timeout=100, env={"POLYSCALE_TIMEOUT": "120"})
    assert not healthy.timed_out and not failed.timed_out
    assert failed.returncode == 1, "an exception, not a signal"
    assert "sim:1" in failed.stderr
    assert "Out of memory" not in failed.stderr
    assert healthy.returncode in (1, 75)
    assert "rank 1" in healthy.stderr and "sim:1" in healthy.stderr
    assert healthy.seconds - failed.seconds < 20


def _different_places():
    """Rank 0 fails in forward, rank 1 in backward; both catch it and try again."""
    from polyscale_sim import faults

    said = []

    def fault(engine, step):
        if step == 1:
            rank = engine.topology.rank
            tokens = torch.zeros(1, 8, dtype=torch.int64)
            try:
                if rank == 0:
                    faults.fail_allocation(20, engine.device.index)
                loss = engine(input_ids=tokens, labels=tokens).loss
                faults.fail_allocation(1, engine.device.index)
                engine.backward(loss)
            except torch.OutOfMemoryError as error:
                said.append(error.report.phase)

    try:
        _train(0, fault)
    except polyscale.RankError as error:
        said.append(str(error))
    return said


def test_ranks_that_ran_out_in_different_places_do_not_go_on():
    first, second = ranks(2, accelerator="sim").run(_different_places)
    assert first[0] == "forward" and second[0] == "backward"
    for said in (first, second):
        assert "exceptions in different places" in said[1]
        assert "rank 0 raised in forward" in said[1] and "rank 1 in backward" in said[1]


def _limited(stage, bytes):
    """Train with so little memory that a batch of 8 does not fit and one of 1 does; return losses of the latter."""
    from polyscale_sim import faults

    torch.manual_seed(0)
    model = tiny_gpt2(layers=2, width=32, vocabulary=64, positions=64)
    config = {**_config(stage), "train_micro_batch_size_per_gpu": 8}
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(0, 64, (8, 64), generator=generator)
    losses, errors = [], []
    with polyscale.initialize(model, config=config) as engine:
        if bytes:
            faults.memory_limit(bytes, engine.device.index)
        for _ in range(3):
            if bytes:
                try:
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                except torch.OutOfMemoryError as error:
                    errors.append(str(error))
            loss = engine(input_ids=tokens[:1], labels=tokens[:1]).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        peak = engine.memory().peak
    faults.reset()
    return losses, errors, peak


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_smaller_batch_trains_on_a_full_device_as_if_the_large_one_had_never_been(stage):
    expected = ranks(2, accelerator="sim").run(_limited, stage, 0)
    limit = int(max(peak for _, _, peak in expected) * 1.2)
    for (losses, errors, peak), (oracle, _, _) in zip(
        ranks(2, accelerator="sim").run(_limited, stage, limit), expected, strict=True
    ):
        assert losses == oracle
        assert len(errors) == 3
        assert all("activations and temporary memory" in text for text in errors)
        assert all("train_micro_batch_size_per_gpu 8 -> 4" in text for text in errors)
        assert peak <= limit
