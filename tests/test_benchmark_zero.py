"""``benchmarks/zero.py``: what it writes, what it refuses, and that it leaves nothing behind."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
ANY_LOAD = ("--busy-limit", "1000")
TINY = ("--model", "tiny", "--warm-rounds", "1")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def _run(*arguments, timeout=400):
    command = [sys.executable, str(BENCHMARKS / "zero.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def _descendants(root):
    """Process ids of all that ``root`` has started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, more = set(), {root}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


@contextlib.contextmanager
def _in_rounds():
    """The benchmark while it measures without end: its process, and the ids of all that it started."""
    command = [sys.executable, str(BENCHMARKS / "zero.py"), *TINY, *ANY_LOAD, "--rounds", "9999"]
    process = subprocess.Popen([*command, "--configs", "torch-ddp"], stderr=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("round 1 ") for line in process.stderr)
        yield process, _descendants(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _all_gone(pids):
    end = time.monotonic() + 20
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_busy_machine_is_refused_with_the_figure(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            done = _run(*TINY, "--rounds", 1, "--configs", "torch-ddp", "--json", tmp_path / "zero.json")
        finally:
            busy.kill()
    assert done.returncode == 2, done.stderr
    assert "refused: other processes use" in done.stderr and "load average" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_configuration_is_answered_with_those_there_are():
    done = _run("--configs", "zero9*", timeout=30)
    assert done.returncode == 1
    assert "zero9*" in done.stderr and "torch-fsdp2-3" in done.stderr


def _modules(monkeypatch, *names):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return [importlib.import_module(f"zero_runs.{name}") for name in names]


def test_the_configuration_whose_losses_differ_is_named(monkeypatch):
    (rounds,) = _modules(monkeypatch, "rounds")
    samples = {name: rounds.Samples() for name in ("compute", "one", "two", "three")}
    for name, last in {"compute": 9.0, "one": 3.0, "two": 3.0000001, "three": 3.1}.items():
        samples[name].losses = [[4.0, last], [4.0, 3.5]]
    with pytest.raises(rounds.LossesDiffer, match=r"three: 3\.1 on rank 0 at step 1") as caught:
        rounds._check_losses(samples)
    assert "two:" not in str(caught.value)
    samples["three"].losses[0][1] = float("nan")
    with pytest.raises(rounds.LossesDiffer, match="three: nan"):
        rounds._check_losses(samples)


def test_bytes_of_a_ring(monkeypatch):
    configurations, traffic = _modules(monkeypatch, "configurations", "traffic")
    least = {each.name: each.least_bytes(100) for each in configurations.CONFIGURATIONS}
    # Two ranks: each half of the model crosses once for every pass (ZeRO, section 7: 2 passes, 3 at stage 3).
    assert (least["compute"], least["torch-ddp"], least["zero2-shm"], least["zero3-shm"]) == (None, 100, 100, 150)
    assert least["zero2-shared"] == 50
    counter = traffic.Counter(4)
    for name in ("all_reduce", "reduce_scatter"):
        counter.add(name, 100)
    counter.add("all_gather", 25)
    sent = {name: entry["sent"] for name, entry in counter.table().items()}
    assert sent == {"all_gather": 75, "all_reduce": 150, "reduce_scatter": 75}
    with pytest.raises(ValueError, match="'all_shuffle' cannot be counted"):
        counter.add("all_shuffle", 1)


@pytest.mark.long
def test_two_configurations_agree_and_are_written(tmp_path):
    path = tmp_path / "zero.json"
    done = _run(*TINY, *ANY_LOAD, "--rounds", 2, "--configs", "ddp-gloo", "fsdp2-3", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "round 2 of 2" in done.stderr and "load average" in done.stderr
    figures = json.loads(path.read_text())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert list(figures["configurations"]) == ["compute", "fsdp2-3", "ddp-gloo"]
    assert figures["losses_apart"] <= figures["loss_tolerance"]
    assert len(figures["other_processes_cores"]) == 2
    assert figures["machine"]["cores"] and figures["versions"]["here"]["torch"]
    parameter_bytes = 4 * figures["model"]["parameters"]
    for name, row in figures["configurations"].items():
        assert len(row["samples"]["seconds"]) == 2 and row["step_s"] > 0, name
        assert [len(losses) for losses in row["losses"]] == [4, 4], name  # warm-up, rounds, the counted step
        assert row["memory"]["pss"] > row["memory"]["data"] > 0, name
    ddp, fsdp2 = (figures["configurations"][name] for name in ("ddp-gloo", "fsdp2-3"))
    assert ddp["losses"][0] != ddp["losses"][1]
    for ours, theirs in zip(ddp["losses"], fsdp2["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert len(set(ours)) == len(ours)
    # All gradients once, and what ranks agree on beside them.
    assert parameter_bytes <= ddp["sent_bytes"] <= 1.02 * parameter_bytes + 1000
    assert ddp["collectives"]["gloo"]["all_reduce"]["given"] >= parameter_bytes
    assert fsdp2["sent_bytes"] > ddp["sent_bytes"]


@pytest.mark.long
def test_a_killed_rank_is_an_error_that_says_so():
    with _in_rounds() as (process, started):
        ranks = started - {pid for pid in started if _descendants(pid)}  # all but what forked them
        assert len(ranks) == 4  # of compute and of torch-ddp
        os.kill(max(ranks), signal.SIGKILL)
        said = process.stderr.read()
        assert process.wait(60) == 1, said
    assert "torch-ddp: a rank ended" in said and "killed by signal 9" in said and "end of its log" in said
    assert _all_gone(started)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_an_interrupt(how):
    with _in_rounds() as (process, started):
        assert len(started) == 5
        process.send_signal(how)
        assert process.wait(60) == (-how if how == signal.SIGKILL else 130)
    assert _all_gone(started)
