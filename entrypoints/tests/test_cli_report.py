"""What the report says of this machine, and of plugins that are broken, ambiguous, or come in pairs."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyscale.discovery import installed as entries
from polyscale.discovery import load
from polyscale.kinds import KINDS
from polyscale.testing.distributions import write_distribution
from polyscale_cli.main import report_main
from polyscale_cli.report import listing, system, verified
from polyscale_cli.report.collect import collect

BIN = Path(sys.executable).parent
PLUGIN_KINDS = "accelerators communications optimizers precisions parallelisms ios checkpoints launchers observers"
ROW = {"name", "distribution", "version", "available", "why", "selected", "verified"}
_NUMBERS = itertools.count()
ACCELERATOR = """
    from polyscale.hooks import hookimpl
    from polyscale.torch_accelerator import TorchAccelerator

    class Made(TorchAccelerator):
        name = device_type = "{name}"
        auto = True
        def is_available(self):
            return True
        def diagnose(self):
            raise OSError("the driver is asleep")

    class Plugin:
        interface_version = (1, 0)
        @hookimpl
        def polyscale_accelerator(self, context):
            return Made()
"""


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYSCALE_ACCELERATOR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if load("accelerator", "cuda").is_available():
        pytest.skip("auto means another device on this machine")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a plugin from source."""

    def install(kind, name, source, *, dist="acme-plugin"):
        module = f"acme_report_{next(_NUMBERS)}"
        entry_points = {f"polyscale.{kind}": {name: f"{module}:Plugin"}}
        folder = tmp_path / module
        write_distribution(folder, dist, entry_points=entry_points, modules={module: source})
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install


def rows(kind, name):
    return [row for row in collect({kind, "accelerator"}).plugins[kind] if row.name == name]


def told(capsys, *arguments):
    code = report_main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@dataclass(frozen=True)
class Alone:
    """What a report in a process of its own printed, and what it imported that was not there before."""

    out: str
    modules: list[str]

    @property
    def others(self):
        """Top-level names that are not the standard library's."""
        names = {name.partition(".")[0] for name in self.modules}
        return {name for name in names - sys.stdlib_module_names if not name.startswith("_sysconfigdata")}


def told_alone(*arguments, before="", after=""):
    code = (
        f"import gc, json, sys\n{before}\nknown = set(sys.modules)\n"
        f"sys.argv = ['scale-report', *{arguments!r}]\n"
        "from polyscale_cli.main import report_main\nassert report_main() == 0\n"
        f"print(json.dumps(sorted(set(sys.modules) - known)), file=sys.stderr)\n{after}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, timeout=120)
    return Alone(done.stdout, json.loads(done.stderr.splitlines()[-1]))


def test_json_has_the_documented_keys_and_the_truth(capsys):
    import torch

    code, out, _ = told(capsys, "--json")
    report = json.loads(out)
    assert code == 0
    assert set(report) == {"polyscale", "python", "torch", "ops", *PLUGIN_KINDS.split()}
    assert report["torch"] == torch.__version__
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    for kind in PLUGIN_KINDS.split():
        assert all(set(row) == ROW for row in report[kind])
        assert all(row["available"] == (row["why"] == "") for row in report[kind])
    accelerators = {row["name"]: row for row in report["accelerators"]}
    assert accelerators["cpu"]["available"]
    assert accelerators["cpu"]["selected"]
    assert not accelerators["cuda"]["available"]
    assert not accelerators["cuda"]["selected"]
    assert "install" in accelerators["cuda"]["why"]
    chosen = {kind: [row["name"] for row in report[kind] if row["selected"]] for kind in PLUGIN_KINDS.split()}
    assert chosen["communications"] == ["shm"]
    assert chosen["parallelisms"] == ["ddp"]
    assert chosen["optimizers"] == chosen["observers"] == []


def test_one_kind_alone(capsys):
    code, out, _ = told(capsys, "--json", "--kind", "ios")
    assert code == 0
    assert set(json.loads(out)) == {"polyscale", "python", "torch", "ios"}


def test_list_prints_names_and_imports_neither_plugins_nor_what_takes_long():
    done = told_alone("--list")
    assert {"accelerator=cpu", "optimizer=adamw", "launcher=local"} <= set(done.out.split())
    assert done.others == {"polyscale", "polyscale_cli", "pluggy"}
    assert "polyscale.config" not in done.modules


def test_list_is_json_for_programs(capsys):
    code, out, _ = told(capsys, "--json", "--list", "--kind", "launcher")
    assert (code, json.loads(out)) == (0, listing.listing("launcher"))
    assert "launcher=local" in json.loads(out)


def test_list_names_what_is_installed_and_broken_too(plugin):
    plugin("io", "odd", "raise RuntimeError")
    assert "io=odd" in listing.listing("io")


def test_the_table_fits_80_columns_has_no_colour_codes_and_ends_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, _ = told(capsys)
    assert code == 0
    lines = out.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out
    assert lines[-1] == "Training would use cpu. Next: scale run train.py"
    for word in ("C++ compiler", "ninja", "shared memory", "NUMA nodes", "network interfaces", "cuda: driver"):
        assert word in out


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("import sys; print('hello'); sys.exit(3)", "exit(3)"),
        ("class Plugin:\n    interface_version = (9, 0)", "9.0"),
        ("class Plugin:\n    interface_version = (1, 0)", "polyscale_io"),
    ],
)
def test_a_broken_plugin_is_a_row_with_the_reason(plugin, capfd, source, word):
    plugin("io", "odd", source)
    (row,) = rows("io", "odd")
    assert (row.distribution, row.version, row.available) == ("acme-plugin", "1.0", False)
    assert word in row.why
    assert capfd.readouterr().out == ""
    assert rows("io", "threads")[0].available


def test_a_name_that_two_claim_is_two_rows_that_name_both(plugin):
    for dist in ("acme-one", "acme-two"):
        plugin("io", "odd", "", dist=dist)
    found = rows("io", "odd")
    assert [row.distribution for row in found] == ["acme-one", "acme-two"]
    assert all(not row.available and "acme-one" in row.why and "acme-two" in row.why for row in found)


def test_two_accelerators_are_a_question_and_none_is_selected(plugin, capsys):
    for name in ("one", "two"):
        plugin("accelerator", name, ACCELERATOR.format(name=name), dist=f"acme-{name}")
    code, out, _ = told(capsys)
    assert code == 0
    assert "chosen" not in out.split("communications")[0]
    words = " ".join(out.split())
    last = words[-400:]
    assert '"accelerator": "one"' in last
    assert "POLYSCALE_ACCELERATOR=one" in last
    assert "the driver is asleep" in words


def test_the_environment_overrides_and_its_failure_is_told(monkeypatch):
    monkeypatch.setenv("POLYSCALE_ACCELERATOR", "cuda")
    report = collect({"accelerator"})
    assert "POLYSCALE_ACCELERATOR" in report.choice
    assert not any(row.selected for row in report.plugins["accelerator"])


def test_require_tells_scripts_by_the_exit_code(plugin, capsys):
    plugin("io", "odd", "raise RuntimeError('no licence')")
    assert told(capsys, "--require", "accelerator=cpu", "--require=io=threads")[0] == 0
    assert told(capsys, "--require", "optimizer=AdamW")[:2] == (0, "optimizer=AdamW can be used\n")
    assert told(capsys, "--require", "io=Threads")[0] == 1
    code, out, err = told(capsys, "--require", "accelerator=cpu", "--require", "io=odd")
    assert code == 1
    assert "accelerator=cpu can be used" in out
    assert "io=odd cannot be used" in err
    assert "no licence" in err
    code, _, err = told(capsys, "--require", "accelerator=cdua")
    assert code == 1
    assert "'cuda'" in err


@pytest.mark.parametrize("bad", ["cpu", "accelerator=", "=cpu", "acelerator=cpu"])
def test_a_malformed_requirement_is_a_user_s_error(capsys, bad):
    code, _, err = told(capsys, "--require", bad)
    assert code == 2
    assert err.startswith("Error: ")


def report_beside(tmp_path, backends):
    """The report of a process whose ``import torch`` loads these packages: name -> body of the function torch calls."""
    for name, body in backends.items():
        module = name.replace("-", "_")
        source = f"def start():\n    {body}\n"
        entry_points = {"torch.backends": {name: f"{module}:start"}}
        write_distribution(tmp_path / name, name, entry_points=entry_points, modules={module: source})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tmp_path / name) for name in backends)}
    command = [BIN / "scale-report", "--json", "--kind", "accelerator"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param("raise RuntimeError('wrong driver')", "wrong driver", marks=pytest.mark.long),
        ("print('a banner'); raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_package_that_breaks_import_torch_is_named(tmp_path, body, said):
    report = report_beside(tmp_path, {"acme-backend": body})
    assert report["torch"] is None
    why = report["accelerators"][0]["why"]
    for word in ("acme-backend", said, "pip uninstall acme-backend", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert word in why


def test_of_two_packages_that_claim_torch_s_slot_the_second_is_named(tmp_path):
    claim = "import torch; torch.utils.rename_privateuse1_backend('{}')"
    report = report_beside(tmp_path, {f"acme-{name}": claim.format(name) for name in ("one", "two")})
    why = report["accelerators"][0]["why"]
    assert "because of the package acme-two" in why
    assert "acme-one " not in why


def test_verified_is_the_hardware_of_the_newest_record_wherever_it_is_kept(plugin, tmp_path):
    folder = plugin("io", "odd", "")
    package = folder / "acme_kept"
    package.mkdir()
    (package / "__init__.py").write_text("")
    old = {"hardware": "Old Chip", "torch": "2.11.0", "passed": ["io=odd", "io=other"], "date": "2001-01-01"}
    (package / "verified.json").write_text(json.dumps([old, {"hardware": "No Date"}, "nonsense"]))
    assert verified.verified("io", "odd", "acme_kept:Plugin") == "Old Chip"
    assert verified.verified("io", "third", "acme_kept:Plugin") == "never"
    path = verified.record_verification(["io=odd"], torch="2.13.0", hardware="New Chip")
    assert path == tmp_path / "state" / "polyscale" / "verified.json"
    assert verified.verified("io", "odd", "acme_kept:Plugin") == "New Chip"
    verified.record_verification(["accelerator=cpu"], torch="2.13.0")
    assert verified.verified("io", "odd", "acme_kept:Plugin") == "New Chip"
    assert rows("accelerator", "cpu")[0].verified == verified.processor() != ""
    path.write_text("{ broken")
    assert verified.verified("io", "odd", "acme_kept:Plugin") == "Old Chip"


def test_facts_about_the_machine_are_found_or_said_to_be_unknown(monkeypatch):
    assert system.count_ranges("0-3,8,10-11") == 7
    names = [fact.name for fact in system.system_facts()]
    assert names[:3] == ["C compiler", "C++ compiler", "ninja"]
    monkeypatch.setenv("PATH", "/nowhere")
    none = system.compiler("C compiler", ("cc", "gcc"))
    assert (none.value, none.ok) == ("none", False)
    monkeypatch.setattr(system.socket, "if_nameindex", lambda: 1 / 0)
    assert "unknown (ZeroDivisionError" in system.system_facts()[-1].value


def test_the_report_imports_little_beyond_torch():
    """What it takes is measured by benchmarks/startup.py; this is what it comes from, beside asking each plugin."""
    done = told_alone(before="import torch")
    plugins = {entry.value.partition(".")[0].partition(":")[0] for kind in KINDS for entry in entries(kind)}
    ours = {"polyscale", "polyscale_cli", *plugins}
    # Neither pydantic (a third of a report's own time) nor packaging, of which a judgement of an SDK has need.
    assert done.others - ours <= {"pluggy", "stevedore", "rich", "ninja", "platformdirs"}
    assert [name for name in done.modules if name.startswith("torch.")] == []
    assert [name for name in done.modules if name.startswith("polyscale.engine")] == []


def test_a_report_that_ends_its_process_collects_no_garbage():
    done = told_alone("--list", after="print(gc.isenabled(), gc.get_freeze_count() > 0)")
    assert done.out.splitlines()[-1] == "False True"


def test_why_is_one_line(capsys):
    told(capsys)
    report = collect()
    assert all(re.fullmatch(r"[^\n]*", row.why) for found in report.plugins.values() for row in found)
