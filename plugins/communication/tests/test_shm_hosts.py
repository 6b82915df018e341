"""Groups of ranks on two hosts: a real second host name and process namespace, in which the third rank lives."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shm_ranks import only_shm

RANK = Path(__file__).with_name("shm_host_rank.py")
ELSEWHERE = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]


def _why_no_second_host():
    if shutil.which("unshare") is None:
        return "there is no unshare"
    done = subprocess.run([*ELSEWHERE, "hostname elsewhere"], capture_output=True, text=True, check=False)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture
def started():
    """Start a rank, here or on the second host."""
    processes = []

    def start(command, elsewhere):
        command = [*ELSEWHERE, f"hostname elsewhere && exec {shlex.join(command)}"] if elsewhere else command
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.long
@only_shm
def test_groups_across_hosts_use_gloo_and_those_of_one_host_use_its_memory(started, tmp_path):
    why_not = _why_no_second_host()
    if why_not:
        pytest.skip(why_not)
    commands = [[sys.executable, str(RANK), str(tmp_path / "store"), str(rank), "3"] for rank in range(3)]
    processes = [started(command, rank == 2) for rank, command in enumerate(commands)]
    told = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    found = [json.loads(out) for out, _ in told]
    assert [each["received"] for each in found] == [[2.0] * 3, [0.0] * 3, [1.0] * 3]
    for name, ranks in {"all": (0, 1, 2), "here": (0, 1), "across": (1, 2)}.items():
        for rank, each in enumerate(found):
            if rank not in ranks:
                assert each[name] == {}
                continue
            assert each[name]["total"] == [float(sum(other + 1 for other in ranks))], (name, rank)
            why = each[name]["why_gloo"]
            assert ("its ranks are on several hosts: rank 0 on" in why and "elsewhere" in why) == (2 in ranks), why
            assert name != "here" or why == ""
    warned = "".join(err for _, err in told)
    assert 1 <= warned.count("groups use gloo") <= 3, warned  # no launcher has told these processes their ranks
