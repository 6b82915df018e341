import json
import subprocess
import sys

import pytest

# Saves a checkpoint again and again in a forked child that kills itself (SIGKILL) before its k-th change of the file
# system, for every k until the save completes; after each kill, what is there must load, and the next save must work.
PROGRAM = """
import json, os, shutil, signal, sys
from pathlib import Path
from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, read_manifest, write_manifest

top, overwrite = Path(sys.argv[1]), sys.argv[2] == "overwrite"
left = None  # changes until the kill; None: never

def change(path):
    global left
    if left is not None and str(top) in str(path):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def hook(event, arguments):
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        change(arguments[0])
    elif event == "open" and isinstance(arguments[0], str) and arguments[2] and arguments[2] & (os.O_CREAT | os.O_RDWR):
        change(arguments[0])

def save(root, tag, step):
    directory = CheckpointDirectory(root)
    tmp = directory.begin(tag, overwrite=overwrite)
    (tmp / "tensors" / "data").write_text(str(step))
    write_manifest(tmp, Manifest(1, 0, "ddp", counters={"steps": step}))
    directory.commit(tmp, tag, overwrite)

def loaded(root, tag=None):
    path = CheckpointDirectory(root).resolve(tag)
    step = read_manifest(path).counters["steps"]
    assert (path / "tensors" / "data").read_text() == str(step), path
    return step

sys.addaudithook(hook)
real_fsync = os.fsync
os.fsync = lambda descriptor: (change(top), real_fsync(descriptor))
save(top / "start", "a", 1)
kills, seen = 0, set()
while True:
    root = top / f"after{kills + 1}"
    shutil.copytree(top / "start", root)
    child = os.fork()
    if child == 0:
        left = kills + 1
        save(root, "a" if overwrite else "b", 2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    step = loaded(root)
    seen.add(step)
    if overwrite:
        assert loaded(root, "a") in (1, 2)
    else:
        assert loaded(root, "a") == 1
    if status == 0:
        assert step == 2
        break
    assert os.WIFSIGNALED(status), status
    save(root, "c", 3)
    assert loaded(root) == 3 and loaded(root, "a") in (1, 2)
    assert not [name for name in os.listdir(root) if name.startswith(".")], os.listdir(root)
    shutil.rmtree(root)
    kills += 1
print(json.dumps({"kills": kills, "steps": sorted(seen)}))
"""


@pytest.mark.parametrize("how", ["new", "overwrite"])
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_kill_before_any_change_of_the_file_system_leaves_a_checkpoint_that_loads(tmp_path, how):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), how], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["steps"] == [1, 2]  # some kills left the old one the newest, some the new one
    assert result["kills"] > 12


NO_SPACE = """
import os, resource, signal, sys
from pathlib import Path
from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, write_manifest
from polyscale.errors import CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = CheckpointDirectory(sys.argv[1])
for step, limit in ((1, resource.RLIM_INFINITY), (2, 400), (3, 0)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    tmp = directory.begin(f"step{step}")
    try:
        write_manifest(tmp, Manifest(1, 0, "ddp", counters={f"counter{i}": i for i in range(100)}))
        directory.commit(tmp, f"step{step}")
    except CheckpointError as error:
        directory.abort(tmp)
        print(error)
assert directory.resolve() == directory.path("step1")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tmp = directory.begin("step4")
write_manifest(tmp, Manifest(1, 0, "ddp"))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # not even 'latest' can be written
try:
    directory.commit(tmp, "step4")
except CheckpointError as error:
    directory.abort(tmp)
    print(error)
assert directory.tags() == ["step1"] and directory.latest() == "step1", os.listdir(directory.root)
assert sorted(os.listdir(directory.root)) == ["latest", "step1"]
"""


def test_without_space_the_save_is_an_error_and_the_old_checkpoint_stands(tmp_path):
    run = subprocess.run([sys.executable, "-c", NO_SPACE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3 and all("File too large" in line and "ulimit -f" in line for line in lines), run.stdout
