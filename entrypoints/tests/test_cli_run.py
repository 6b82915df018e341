"""``scale run`` from a shell: exit codes, signals, real collectives without a host name that resolves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyscale_cli.commands import run as run_command
from polyscale_cli.main import main

BIN = Path(sys.executable).parent
REDUCE = """
import datetime, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.tolist(), sys.argv[1:])
dist.destroy_process_group()
sys.exit(7 * dist.is_initialized())
"""


def in_a_host_whose_name_does_not_resolve(command):
    """Prefix ``command`` so that it runs under another host name, where this user may change it."""
    prefix = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"]
    try:
        allowed = subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        allowed = False
    return [*prefix, *command] if allowed else command


def test_ranks_reduce_over_loopback_where_the_host_name_does_not_resolve(tmp_path):
    (tmp_path / "reduce.py").write_text(REDUCE)
    command = in_a_host_whose_name_does_not_resolve([BIN / "scale", "run", "--nproc", "2", "reduce.py", "--help"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] sum [3.0, 3.0, 3.0] ['--help']" for rank in (0, 1)]


def test_ctrl_c_is_130_and_leaves_no_process(tmp_path):
    (tmp_path / "wait.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [BIN / "polyscale", "run", "--nproc", "2", "wait.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split("] ")[1].split()]
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=30) == 130
    assert len(pids) == 4
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_exit_code_and_the_cause_reach_the_shell(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "train.py").write_text(
        "import os, sys, time\ntime.sleep(9 * (os.environ['RANK'] == '0'))\nsys.exit(9)"
    )
    command = [BIN / "scale", "run", "--nproc", "2", "-m", "job.train"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9
    assert done.stderr.splitlines() == ["Rank 1 exited with code 9, the first to fail; the others were ended"]


def test_dry_run_prints_a_line_for_each_rank_and_starts_nothing(capsys, tmp_path):
    (tmp_path / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = main(["run", "--nproc", "3", "--dry-run", str(tmp_path / "train.py"), "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [f"RANK={rank} " in line for rank, line in enumerate(lines)] == [True] * 3
    assert all(line.endswith(f"{tmp_path}/train.py --steps 2") for line in lines)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("x.txt", "hello\n", "ends in .txt"),
        ("data.json", "{}", "ends in .json"),
        ("notes", "Dear all,\n", "line 1"),
        ("binary", "\0\1", "null bytes"),
        ("job", "#!/bin/sh\nls\n", "chmod"),
    ],
)
def test_a_file_that_is_plainly_no_python_is_refused(name, text, word, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["run", "--dry-run", "--nproc", "1", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert word in err and name in err


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.py", "no python"), ("train", "print(1)"), ("x.txt", "#!/usr/bin/env python3\nprint(1)"), ("v1.2", "pass")],
)
def test_a_file_that_may_be_python_is_run(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["run", "--dry-run", "--nproc", "1", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(name)


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (4, 4), (0, 1)])
def test_without_nproc_there_is_a_rank_per_device(devices, ranks, monkeypatch, capsys):
    class Accelerator:
        def device_count(self):
            return devices

    monkeypatch.setattr(run_command, "select_accelerator", Accelerator)
    assert main(["run", "--dry-run", __file__]) == 0
    assert len(capsys.readouterr().out.splitlines()) == ranks
