import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, read_manifest, write_manifest
from polyscale.checkpoint.names import Hidden
from polyscale.errors import CheckpointError


def save(directory, tag, step=0, overwrite=False):
    tmp = directory.begin(tag, overwrite=overwrite)
    (tmp / "tensors" / "data").write_text(str(step))
    write_manifest(tmp, Manifest(world_size=1, stage=0, data_parallel="ddp", counters={"steps": step}))
    directory.commit(tmp, tag, overwrite)


def names(root):
    return sorted(path.name for path in root.iterdir())


def hidden(root):
    return [name for name in names(root) if name.startswith(".")]


def test_saved_checkpoints_are_listed_in_order_of_their_numbers_and_the_last_is_the_latest(tmp_path):
    directory = CheckpointDirectory(tmp_path / "new" / "root")
    for step in (2, 10, 1):
        save(directory, f"step{step}", step)
    assert directory.tags() == ["step1", "step2", "step10"]
    assert directory.latest() == "step1"
    assert directory.resolve() == directory.path("step1") == tmp_path / "new" / "root" / "step1"
    assert read_manifest(directory.resolve("step10")).counters == {"steps": 10}
    assert hidden(directory.root) == []


@pytest.mark.parametrize(
    "tag",
    ["", " ", ".x", "a/b", "a\\b", "..", "a\nb", "a\0b", "latest", "x" * 200, 7, None, "a b", "a:b", "été", "a*", "a."],
)
def test_names_that_are_no_tags_are_refused_before_anything_is_made(tmp_path, tag):
    directory = CheckpointDirectory(tmp_path / "root")
    with pytest.raises(CheckpointError, match="Tag"):
        directory.begin(tag)
    assert not directory.root.exists()


def test_what_lies_there_under_another_name_can_be_loaded_though_not_saved(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, "Step_1.0-a")
    directory.path("Step_1.0-a").rename(tmp_path / "best one")
    (tmp_path / "latest").write_text("best one\n")
    assert directory.resolve() == directory.resolve("best one") == tmp_path / "best one"
    with pytest.raises(CheckpointError, match=r"holds ' ', which not every file system can store. Use letters"):
        directory.begin("best one", overwrite=True)


def test_an_existing_tag_is_refused_without_overwrite_and_replaced_with_it(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, "a", 1)
    with pytest.raises(CheckpointError, match=r"exists.*overwrite=True"):
        directory.begin("a")
    assert hidden(tmp_path) == []
    save(directory, "a", 2, overwrite=True)
    assert read_manifest(directory.resolve("a")).counters == {"steps": 2}
    assert names(tmp_path) == ["a", "latest"]


def test_two_saves_of_one_tag_at_once_do_not_mix(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    first, second = directory.begin("a"), directory.begin("a")
    for step, tmp in enumerate((first, second)):
        write_manifest(tmp, Manifest(1, 0, "ddp", counters={"steps": step}))
    directory.commit(first, "a")
    with pytest.raises(CheckpointError, match="exists"):
        directory.commit(second, "a")
    assert read_manifest(directory.resolve("a")).counters == {"steps": 0}
    directory.abort(second)
    assert names(tmp_path) == ["a", "latest"]


def test_a_checkpoint_without_manifest_is_not_committed(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    tmp = directory.begin("a")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        directory.commit(tmp, "a")
    assert directory.tags() == []


def test_abort_removes_the_temporary_directory_and_nothing_else(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, "a")
    tmp = directory.begin("b")
    directory.abort(tmp)
    directory.abort(tmp)
    for path in (directory.path("a"), tmp_path, tmp_path / "elsewhere" / tmp.name):
        with pytest.raises(CheckpointError, match="no temporary directory"):
            directory.abort(path)
    assert names(tmp_path) == ["a", "latest"]


def test_what_cannot_be_loaded_is_refused_with_the_reason(tmp_path):
    directory = CheckpointDirectory(tmp_path / "root")

    def refused(tag=None, where=directory):
        with pytest.raises(CheckpointError) as caught:
            where.resolve(tag)
        return str(caught.value)

    assert "there is no such directory" in refused()
    directory.root.mkdir()
    assert "no file 'latest'" in refused() and "Save one first" in refused()
    directory.begin("half")
    assert "half-written half" in refused() and "interrupted" in refused("half")
    save(directory, "step100")
    assert "Did you mean 'step100'?" in refused("step1000")
    assert "Tag '../x'" in refused("../x")
    (directory.root / "empty").mkdir()
    assert "manifest.json is missing" in refused("empty")
    assert "tag='step100'" in refused(where=CheckpointDirectory(directory.root / "step100"))
    assert "it is a file" in refused(where=CheckpointDirectory(directory.root / "latest"))
    (directory.root / "latest").write_text("../../etc\n")
    assert "says '../../etc'" in refused() and "Name one of: step100" in refused()
    (directory.root / "latest").write_text("gone\n")
    assert "'gone'" in refused() and "which its file 'latest' names: there is none of that name" in refused()
    assert "step100" in refused() and "latest" not in refused("gone")
    (directory.root / "latest").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused()


def test_directories_of_processes_that_are_gone_are_removed_and_others_kept(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, "a")
    code = (
        "import sys; from polyscale.checkpoint.directory import *; print(CheckpointDirectory(sys.argv[1]).begin('b'))"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    left = Path(dead.stdout.strip()).name
    mine = directory.begin("c")  # which cleans up
    assert left.startswith(".b.tmp-") and hidden(tmp_path) == [mine.name]

    name = Hidden.parse(mine.name)
    elsewhere = tmp_path / str(Hidden("d", "tmp", "00000000", name.pid, name.start, "abcdef"))
    reused = tmp_path / str(Hidden("d", "tmp", name.host, name.pid, name.start + 1, "abcdef"))
    stranger = tmp_path / ".git"
    for path in (elsewhere, reused, stranger):
        path.mkdir()
    directory.clean_stale()
    kept = {mine.name, elsewhere.name, ".git"}
    assert set(hidden(tmp_path)) == (kept if Path("/proc/self/stat").exists() else kept | {reused.name})


def test_a_checkpoint_left_aside_is_loaded_and_moved_back(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    save(directory, "a", 1)
    name = Hidden.mine("a", "old")
    aside = tmp_path / str(Hidden("a", "old", name.host, 2**22 + 1, 1, "abcdef"))  # beyond any process number
    directory.path("a").rename(aside)
    assert directory.resolve() == aside and directory.tags() == ["a"]
    with pytest.raises(CheckpointError, match="exists"):
        directory.begin("a")
    assert directory.resolve() == directory.path("a")
    assert hidden(tmp_path) == []


def test_a_root_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointDirectory(tmp_path / "file" / "root").begin("a")
