"""Packages of third parties: built, installed beside polyscale's wheels, seen, used in training, uninstalled and gone.

The device is compiled once per machine (about a minute on an idle one) and shared by all environments.
"""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "third-party-accelerator"
SCRIPT = ROOT / "docs" / "examples" / "train_gpt.py"
VENDORS = ROOT / "docs" / "vendors.md"
MOST_LINES = 60
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_layer": 1, "n_embd": 16, "n_head": 2}
SIZES = ["--model", json.dumps(GPT2), "--length", "32", "--validation", "4", "--batch", "2", "--steps", "3"]
RANKS = ["scale", "run", "--nproc", "2"]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def environment(clean_environment, tmp_path_factory):
    """polyscale with the simulated device, which has been built."""
    made = clean_environment(tmp_path_factory.mktemp("third") / "venv", "polyscale-backend-sim")
    shell(made, made.folder, "scale build sim", timeout=600)
    return made


def shell(environment, folder, line, *, code=0, timeout=120):
    """Run a line of a page as a user types it."""
    done = environment.run("bash", "-c", line, cwd=folder, timeout=timeout, TOKENIZERS_PARALLELISM="false")
    assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def names(environment):
    return environment.run("scale-report", "--list").stdout.splitlines()


def copied(folder):
    """A copy of the example: what builds it must not write into the tree."""
    ignored = shutil.ignore_patterns("__pycache__", "dist")
    return shutil.copytree(EXAMPLE, folder / EXAMPLE.name, ignore=ignored)


def trained(environment, folder, accelerator, stage):
    """What the example script prints on rank 0 of two: records, without the time they took."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"The sum of {n} and {n} is {n + n}." for n in range(400)), "utf-8")
    out = ["--text", text, "--stage", stage, "--out", folder / f"{accelerator}-{stage}"]
    done = environment.run(*RANKS, SCRIPT, *SIZES, *out, POLYSCALE_ACCELERATOR=accelerator, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("[rank 0] ")) for line in done.stdout.splitlines()]


def reported(text):
    """Losses that the example script has printed."""
    records = [json.loads(line.removeprefix("[rank 0] ")) for line in text.splitlines() if '{"step"' in line]
    return [record[key] for record in records for key in ("validation_loss", "loss") if key in record]


def test_the_example_is_short_and_polyscale_does_not_know_it():
    files = [path for path in EXAMPLE.rglob("*.py") if "__pycache__" not in path.parts]
    assert 0 < sum(len(path.read_text("utf-8").splitlines()) for path in files) <= MOST_LINES
    projects = [path for depth in ("", "*/", "*/*/") for path in ROOT.glob(f"{depth}pyproject.toml")]
    listed = [ROOT / "Makefile", ROOT / "tests" / "dev.txt", *projects]
    assert not [path for path in listed if re.search("acme|third-party", path.read_text("utf-8"))]


def test_the_accelerator_of_the_page_for_vendors():
    from polyscale.errors import UnsupportedError
    from polyscale.interfaces.accelerator import Accelerator

    namespace = {}
    for block in blocks(VENDORS, "python"):
        exec(compile(block, str(VENDORS), "exec"), namespace)
    made = namespace["AcmeAccelerator"]()
    assert isinstance(made, Accelerator)
    assert made.why_unavailable() == "the Acme driver is not loaded; see https://acme.example/driver"
    assert [(row.name, row.value, row.ok) for row in made.diagnose()] == [
        ("devices", "none", False),
        ("driver", "none", False),
        ("compiler", "none", True),
    ]
    with pytest.raises(UnsupportedError, match="pip install torch-acme"):
        made.activate()
    assert {case.accelerator for case in namespace["SUITE"].cases} == {"acme"}


def test_the_page_for_vendors_lists_every_method_of_an_accelerator():
    from polyscale.interfaces.accelerator import Accelerator

    (table,) = re.findall(r"^\| method \|.*?\n\n", VENDORS.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    methods = [name for name, value in vars(Accelerator).items() if callable(value) and not name.startswith("_")]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == methods


@pytest.mark.long
def test_an_accelerator_of_a_third_party_is_seen_trains_and_goes(environment, tmp_path):
    copied(tmp_path)
    assert "accelerator=acme" not in names(environment)
    shell(environment, tmp_path, f"pip wheel --no-deps --wheel-dir acme-dist ./{EXAMPLE.name}")
    shell(environment, tmp_path, "pip install --find-links acme-dist acme-polyscale")
    try:
        table = shell(environment, tmp_path, "scale-report --kind accelerator")
        assert re.search(r"^\s*acme +acme-polyscale 1\.0 +1\.0 +usable", table, re.MULTILINE), table
        report = json.loads(environment.run("scale-report", "--json", "--kind", "accelerator").stdout)
        (row,) = (row for row in report["accelerators"] if row["name"] == "acme")
        assert (row["distribution"], row["available"], row["selected"]) == ("acme-polyscale", True, False)
        records = trained(environment, tmp_path, "acme", 3)
        found = [record["validation_loss"] for record in records if "validation_loss" in record]
        assert found[0] == pytest.approx(math.log(GPT2["vocab_size"]), abs=0.3)
        assert found[-1] < found[0]
        # That of the device; as the accelerator cpu counts, it is that of a process that has imported torch.
        assert max(record["memory_mb"] for record in records if "memory_mb" in record) < 50
    finally:
        shell(environment, tmp_path, "pip uninstall -y acme-polyscale")
    assert "accelerator=acme" not in names(environment)
    config = {"train_micro_batch_size_per_gpu": 1, "backends": {"accelerator": "acme"}}
    code = f"import torch, polyscale; polyscale.initialize(torch.nn.Linear(1, 1), config={config})"
    done = environment.run("python", "-c", code)
    assert done.returncode == 1
    assert re.search("PluginError: No accelerator 'acme'.*Installed: .*cpu.*sim", done.stderr), done.stderr


@pytest.mark.long
def test_what_scale_new_writes_can_be_installed_and_computes(environment, tmp_path):
    shell(environment, tmp_path, "scale new accelerator fresh")
    shell(environment, tmp_path, "pip install ./fresh-polyscale")
    try:
        select = "-k 'report or every_method' -q -W error -p no:cacheprovider"
        said = shell(environment, tmp_path, f"python -m pytest {select} fresh-polyscale/tests/test_accelerator.py")
        assert re.search("^2 passed", said, re.MULTILINE), said
    finally:
        shell(environment, tmp_path, "pip uninstall -y fresh-polyscale")


@pytest.mark.long
def test_the_commands_of_the_examples_readme_train_at_every_stage(environment, tmp_path):
    copied(tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    lines = [line for block in blocks(EXAMPLE / "README.md", "sh") for line in block.splitlines()]
    assert [line.split("--stage ")[1][0] for line in lines if "--stage" in line] == ["0", "1", "2", "3"]
    said = {line: shell(environment, tmp_path, line, timeout=300) for line in lines}
    found = [reported(text) for line, text in said.items() if "--stage" in line]
    assert len(found) == 4 and len(found[0]) >= 7
    (line,) = (line for line in lines if "--stage 3" in line)
    on_cpu = line.replace("ACCELERATOR=acme", "ACCELERATOR=cpu").replace("stage-3", "cpu")
    found.append(reported(shell(environment, tmp_path, on_cpu, timeout=300)))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3)
    assert "accelerator=acme" not in said["scale-report --list"]
    assert not set(environment.packages) & {"acme_polyscale"}


@pytest.mark.long
def test_the_commands_of_the_page_for_vendors(environment, tmp_path):
    start, other, publish = ([*block.splitlines()] for block in blocks(VENDORS, "sh"))
    try:
        said = {line: shell(environment, tmp_path, line, timeout=500) for line in start + other}
        (tests,) = (text for line, text in said.items() if "pytest" in line)
        assert "passed" in tests and "skipped" not in tests
        (record,) = blocks(VENDORS, "json")
        (tmp_path / "acme-polyscale" / "acme_polyscale" / "verified.json").write_text(record, "utf-8")
        for line in publish:
            if "uninstall" in line:
                break
            shell(environment, tmp_path, line)
        report = json.loads(environment.run("scale-report", "--json", "--kind", "accelerator").stdout)
        assert [row["verified"] for row in report["accelerators"] if row["name"] == "acme"] == ["Acme X1"]
    finally:
        shell(environment, tmp_path, publish[-1])
    assert "accelerator=acme" not in names(environment)


@pytest.mark.long
def test_plugins_of_other_kinds_work_beside_installed_wheels(environment, tmp_path):
    kinds = ("optimizer", "op")  # the templates of all kinds are tried without wheels, by tests of the command
    for kind in kinds:
        shell(environment, tmp_path, f"scale new {kind} acme_{kind} && pip install ./acme-{kind}-polyscale")
    try:
        tests = " ".join(f"acme-{kind}-polyscale/tests" for kind in kinds)
        assert "acme_op_polyscale_kernels" in shell(environment, tmp_path, "scale build acme_op")
        said = shell(environment, tmp_path, f"python -m pytest -q -W error -p no:cacheprovider {tests}")
        assert re.search("^11 passed", said, re.MULTILINE), said
    finally:
        shell(environment, tmp_path, f"pip uninstall -y {' '.join(f'acme-{kind}-polyscale' for kind in kinds)}")
