"""Ranks under the launcher ``local``: what they find, what is shown, how they end. Ranks import no torch: quick."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from polyscale.errors import PolyscaleError
from polyscale.interfaces.launcher import LaunchRequest
from polyscale_standard.launcher import LocalLauncher, local
from polyscale_standard.launcher.processes import Ended
from polyscale_standard.launcher.streams import Console, LineBuffer


def script(folder, text):
    path = folder / "script.py"
    path.write_text("import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


def run(path, *arguments, nproc=2, **others):
    return LocalLauncher().run(LaunchRequest([path, *arguments], nproc=nproc, **others))


def gone(pid, within_s=5.0):
    """Whether the process has ended (a zombie that nobody reaps has ended too)."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_ranks_get_torchrun_s_contract_their_arguments_untouched_and_prefixed_lines(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = script(
        tmp_path,
        "names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS EXTRA'\n"
        "print(*[os.environ[name] for name in names.split()])\n"
        "print(sys.argv[1:], file=sys.stderr)\n"
        "assert int(os.environ['MASTER_PORT']) and os.environ['TORCHELASTIC_RUN_ID']\n"
        "print('no newline', end='')\n",
    )
    arguments = ["--help", "$HOME $$", "${local_rank}", "-m", ""]
    logs = tmp_path / "logs"
    assert run(path, *arguments, log_dir=str(logs), env={"EXTRA": "more"}) == 0
    out, err = capfd.readouterr()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        said = f"{rank} {rank} 2 2 127.0.0.1 {threads} more"
        assert f"[rank {rank}] {said}\n" in out
        assert f"[rank {rank}] no newline\n" in out
        assert f"[rank {rank}] {arguments}\n" in err
        assert (logs / f"rank{rank}.stdout.log").read_text() == f"{said}\nno newline"
        assert (logs / f"rank{rank}.stderr.log").read_text() == f"{arguments}\n"


def test_a_line_is_shown_when_it_is_written(tmp_path):
    path = script(tmp_path, "print('now')\nif rank == 0: time.sleep(20)\n")
    seen = {}

    class Stream:
        def write(self, text):
            seen.setdefault(text, time.monotonic())
            if len(seen) == 2:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def flush(self):
            pass

    original, sys.stdout = sys.stdout, Stream()
    try:
        assert run(path) == 128 + signal.SIGTERM
    finally:
        sys.stdout = original
    assert set(seen) == {"[rank 0] now\n", "[rank 1] now\n"}


def test_the_exit_code_is_that_of_the_first_failing_rank_and_nothing_is_left(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(local, "LINGER_S", 0.3)
    monkeypatch.setattr(local, "GRACE_S", 1.0)
    path = script(
        tmp_path,
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"    open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({str(tmp_path / 'pids')!r}): time.sleep(0.02)\n"
        "sys.exit(7)\n",
    )
    assert run(path) == 7
    assert all(gone(pid) for pid in (tmp_path / "pids").read_text().split())
    assert "Rank 1 exited with code 7, the first to fail" in caplog.text


def test_a_rank_that_fails_later_because_of_the_first_does_not_give_the_exit_code(tmp_path):
    path = script(tmp_path, "time.sleep(0.1 + 0.15 * (1 - rank))\nsys.exit(3 + rank)\n")
    assert run(path) == 4


def test_a_rank_that_its_watchdog_ended_first_is_not_the_one_to_blame(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(local, "LINGER_S", 0.1)
    path = script(tmp_path, "time.sleep(1.2 * rank)\nsys.exit(9 if rank else 75)\n")
    assert run(path) == 9
    assert "Rank 1 exited with code 9, the first to fail; the others were ended" in caplog.text


def test_a_rank_that_the_launcher_had_to_end_is_not_blamed_for_it(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(local, "LINGER_SECONDARY_S", 0.5)
    path = script(tmp_path, "if rank: time.sleep(60)\nsys.exit(75)\n")
    assert run(path) == 75
    assert "Rank 0 exited with code 75 because of another rank" in caplog.text


@pytest.mark.parametrize("code", [1, 75])
def test_a_rank_that_ended_well_before_the_one_that_waited_for_it_is_named(tmp_path, caplog, code):
    path = script(tmp_path, f"if rank == 0: time.sleep(0.5)\nsys.exit({code} * (rank == 0))\n")
    assert run(path) == code
    assert "Rank 1 ended with code 0 while others still ran; rank 0, the first to fail, exited with" in caplog.text
    assert f"code {code}, probably because it waited for that" in caplog.text


def test_a_rank_that_fails_by_itself_after_another_ended_well_is_named_alone(tmp_path, caplog):
    path = script(tmp_path, "if rank == 0: time.sleep(0.5)\nsys.exit(9 * (rank == 0))\n")
    assert run(path) == 9
    assert "Rank 0 exited with code 9, the first to fail" in caplog.text
    assert "Rank 1" not in caplog.text


def test_ranks_that_find_out_about_a_failure_have_time_to_say_so(tmp_path, capfd):
    path = script(tmp_path, "if rank: sys.exit(5)\ntime.sleep(0.8)\nprint('rank 1 is gone')\nsys.exit(6)\n")
    assert run(path) == 5
    assert "[rank 0] rank 1 is gone" in capfd.readouterr().out


def test_a_signal_that_ends_a_rank_is_128_plus_its_number(tmp_path):
    path = script(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)\n")
    assert run(path, nproc=1) == 128 + signal.SIGSEGV
    assert str(Ended(1, -signal.SIGSEGV)) == "Rank 1 was ended by SIGSEGV"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_ranks_which_may_finish_and_leaves_no_process(tmp_path, number, capfd):
    path = script(
        tmp_path,
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "def finish(*_):\n"
        "    time.sleep(0.5 * rank)\n"
        "    print('finished')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, finish)\n"
        "signal.signal(signal.SIGTERM, finish)\n"
        f"open({str(tmp_path)!r} + f'/pids{{rank}}.tmp', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path)!r} + f'/pids{{rank}}.tmp', {str(tmp_path)!r} + f'/pids{{rank}}')\n"
        "time.sleep(60)\n",
    )
    files = [tmp_path / f"pids{rank}" for rank in (0, 1)]

    def interrupt():
        while not all(file.exists() for file in files):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=interrupt).start()
    assert run(path) == 128 + number
    assert signal.getsignal(number) is before
    assert all(gone(pid) for file in files for pid in file.read_text().split())
    out = capfd.readouterr().out
    assert "[rank 0] finished" in out
    assert "[rank 1] finished" in out


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    path = script(
        tmp_path,
        "if rank == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path)!r} + '/' + str(rank), 'w').write(str(os.getpid()) + ' ' + str(child.pid) + ' ')\n"
        "time.sleep(60)\n",
    )
    code = (
        "from polyscale.interfaces.launcher import LaunchRequest\n"
        "from polyscale_standard.launcher import LocalLauncher\n"
        f"LocalLauncher().run(LaunchRequest([{path!r}], nproc=2))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as launcher:
        files, end = [tmp_path / "0", tmp_path / "1"], time.monotonic() + 60
        while not all(file.exists() and file.read_text().endswith(" ") for file in files):
            assert time.monotonic() < end and launcher.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)  # the guard has been told
        os.killpg(launcher.pid, signal.SIGKILL)
    pids = [pid for file in files for pid in file.read_text().split()]
    assert len(pids) == 4 and all(gone(pid, within_s=10.0) for pid in pids)


def test_the_lines_of_a_dry_run_can_be_pasted_into_shells(tmp_path):
    path = script(tmp_path, "print(rank, os.environ['WORLD_SIZE'], os.environ['MASTER_PORT'], sys.argv[1:])\n")
    lines = LocalLauncher().plan(LaunchRequest([path, "a b", "$c"], nproc=2))
    said = [subprocess.check_output(["sh", "-c", line], text=True).split() for line in lines]
    assert [words[:2] for words in said] == [["0", "2"], ["1", "2"]]
    assert said[0][2:] == said[1][2:]
    assert said[0][3:] == ["['a", "b',", "'$c']"]
    assert shlex.split(lines[0])[-3:] == [path, "a b", "$c"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (LaunchRequest(["missing.py"]), ["Script missing.py", "no such file", "Check the path"]),
        (LaunchRequest(["no-such-program"]), ["no-such-program", "PATH"]),
        (LaunchRequest([]), ["empty command"]),
        (LaunchRequest(["missing.py"], nproc=0), ["nproc 0", "at least one"]),
    ],
)
def test_what_cannot_be_started_is_refused(request_, words):
    for call in (LocalLauncher().plan, LocalLauncher().run):
        with pytest.raises(PolyscaleError) as raised:
            call(request_)
        assert all(word in str(raised.value) for word in words)


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path):
    path = script(tmp_path, "")
    with pytest.raises(PolyscaleError, match="cannot be written"):
        run(path, log_dir=str(tmp_path / "script.py" / "logs"))


class Lines:
    def __init__(self):
        self.seen = []

    def line(self, data):
        self.seen.append(data)


def test_lines_are_cut_whatever_the_chunks():
    lines = Lines()
    buffer = LineBuffer(lines, b"> ")
    for chunk in (b"on", b"e\ntw", b"o\r\n\nthree"):
        buffer.feed(chunk)
    buffer.close()
    assert lines.seen == [b"> one\n", b"> two\n", b"> \n", b"> three\n"]


def test_a_progress_bar_is_shown_at_most_once_a_second_and_its_last_state_always(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = Lines()
    buffer = LineBuffer(lines, b"> ")
    for percent in range(0, 101, 10):
        now[0] += 0.25
        buffer.feed(b"\r%d%%" % percent)
    buffer.feed(b"\ndone\n")
    assert lines.seen == [b"> 20%\n", b"> 60%\n", b"> 100%\n", b"> done\n"]


def test_a_reader_that_has_gone_does_not_stop_ranks():
    class Gone:
        def write(self, text):
            raise BrokenPipeError

    console = Console(Gone())
    console.line(b"one\n")
    console.line(b"two\n")
