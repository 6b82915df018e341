"""What every vendor's accelerator must do with a bad SDK, with another owner of its slot, and in the records."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from polyscale.discovery import load
from polyscale.errors import UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.distributions import write_distribution
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn, pretend_installed

ROOT = Path(__file__).resolve().parent.parent
# accelerator -> module of its SDK, its distribution, a version that is too old, one that is new enough
SDKS = {
    "npu": ("torch_npu", "torch-npu", "2.1.0.post12", "2.13.0"),
    "hpu": ("habana_frameworks.torch", "habana-torch-plugin", "1.17.1.40", "1.23.0"),
    "sdaa": ("torch_sdaa", "torch-sdaa", "2.0.0", "3.3.0b0"),
}
IN_TREE = ("cuda", "rocm", "xpu")


@pytest.fixture(params=SDKS)
def sdk(request, tmp_path, monkeypatch):
    """Install an SDK of a vendor; returns the accelerator."""
    module, distribution, old, new = SDKS[request.param]
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        pytest.skip(f"{distribution} is installed here")

    def install(source, *, is_old=False, requires=()):
        write_distribution(
            tmp_path, distribution, entry_points={}, version=old if is_old else new, requires=list(requires)
        )
        *folders, name = module.split(".")
        folder = tmp_path.joinpath(*folders)
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        return load("accelerator", request.param)

    yield install, distribution
    for name in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]]:
        del sys.modules[name]


def refused(accelerator):
    assert not accelerator.is_available()
    with pytest.raises(UnsupportedError) as caught:
        accelerator.activate()
    assert caught.value.given == f"Accelerator {accelerator.name!r}"
    assert caught.value.fix
    return caught.value


def test_an_old_sdk_is_refused_without_being_imported(sdk):
    install, distribution = sdk
    accelerator = install("import os; os._exit(7)", is_old=True)
    error = refused(accelerator)
    assert f"is installed, and {distribution}>=" in error.why
    assert "pip install --upgrade" in error.fix
    assert error.why in accelerator.why_unavailable()


def test_an_sdk_for_another_torch_is_refused_without_being_imported(sdk):
    install, distribution = sdk
    error = refused(install("import os; os._exit(7)", requires=["torch==2.7.*"]))
    assert distribution in error.why
    assert "requires torch==2.7.*, and torch " in error.why


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('banner'); raise SystemExit(5)", "it called exit(5)"),
        ("import acme_absent", "ModuleNotFoundError: No module named 'acme_absent'"),
    ],
)
def test_an_sdk_that_ends_badly_when_imported_is_named(sdk, capfd, source, said):
    install, _ = sdk
    error = refused(install(source))
    assert f"failed: {said}" in error.why
    assert capfd.readouterr().out == ""


def test_no_device_here_is_a_reason_and_never_an_exception():
    for name in (*SDKS, *IN_TREE):
        accelerator = load("accelerator", name)
        if accelerator.is_available():
            continue
        why = accelerator.why_unavailable()
        assert why
        assert "failed:" not in why, why
        assert accelerator.device_count() == 0
        for call in (accelerator.memory, accelerator.synchronize, accelerator.rng_state, accelerator.new_stream):
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert caught.value.why == why
        with pytest.raises(UnsupportedError) as caught:
            accelerator.set_device(0)
        assert caught.value.why.startswith("0 devices are visible")
        for communication in accelerator.communications:  # refused where it is known not to move the device's tensors
            assert communication in load("communication", communication).backend(accelerator.device_type)
        assert accelerator.visible_devices_variable
        assert accelerator.diagnose()[0].fix == why


def two_owners(first, second):
    for name in (first, second):
        pretend_installed(SDKS[name][0])
    StandIn(read_record(ROOT / f"accelerators/{first}/tests/torch_{first}.json")).install()
    owner, other = load("accelerator", first), load("accelerator", second)
    assert owner.is_available()
    owner.activate()
    assert f"{first!r} owns it" in other.why_unavailable()
    error = refused(other)
    return error.why, error.fix


@pytest.mark.parametrize(("first", "second"), [("npu", "sdaa"), ("sdaa", "npu")])
def test_of_two_owners_of_the_slot_the_second_is_refused_by_name(first, second):
    why, fix = alone(two_owners, first, second)
    assert f"{first!r} owns it in this process" in why
    assert fix.startswith(f"Choose accelerator {first!r}")


def record_in(folder):
    pretend_installed("torch_npu")
    StandIn(read_record(ROOT / "accelerators/npu/tests/torch_npu.json")).install()
    from polyscale_npu import host

    host.first_line = lambda *paths: "Version=25.2.0"
    spec = importlib.util.spec_from_file_location("record_verified", ROOT / "tools/record_verified.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(["--state"])
    from polyscale_cli.report.verified import verified

    value = "polyscale_npu:NpuPlugin"
    return verified("accelerator", "npu", value), verified("accelerator", "sdaa", "polyscale_sdaa:SdaaPlugin")


@pytest.mark.parametrize(
    ("kind", "name", "tried"),
    [
        ("accelerator", "cpu", False),
        ("accelerator", "cuda", True),
        ("op", "cpu_ops", False),
        ("op", "cuda_ops", True),
        ("optimizer", "adamw", False),
    ],
)
def test_tests_marked_gpu_try_plugins_of_gpus_alone(kind, name, tried):
    spec = importlib.util.spec_from_file_location("record_verified", ROOT / "tools/record_verified.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.of_gpus(kind, name) is tried


def test_a_record_names_hardware_driver_torch_and_commit_of_the_device(tmp_path):
    pytest.importorskip("polyscale_npu")
    hardware, absent = alone(record_in, tmp_path, env={"XDG_STATE_HOME": str(tmp_path)})
    assert hardware == "Stand-in 0"
    assert absent == "never"
    records = json.loads((tmp_path / "polyscale" / "verified.json").read_text())
    (npu,) = [record for record in records if "accelerator=npu" in record["passed"]]
    assert (npu["hardware"], npu["driver"]) == ("Stand-in 0", "25.2.0")
    assert npu["torch"]
    assert npu["date"]
    (cpu,) = [record for record in records if "accelerator=cpu" in record["passed"]]
    assert cpu["hardware"] != "Stand-in 0"
