"""An SDK that is old, made for another torch, prints, raises or exits: told by metadata, or caught and named."""

import itertools

import pytest

from polyscale import sdk
from polyscale.errors import UnsupportedError
from polyscale.testing.distributions import write_distribution
from polyscale.torch_accelerator import TorchAccelerator

_NUMBERS = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install an SDK from source; returns an accelerator over it."""

    def make(source, *, version="3.0", requires=()):
        module = f"acme_sdk_{next(_NUMBERS)}"
        name = module.replace("_", "-")
        folder = tmp_path / module
        write_distribution(folder, name, entry_points={}, modules={module: source}, version=version, requires=requires)
        monkeypatch.syspath_prepend(str(folder))

        class Acme(TorchAccelerator):
            device_type = "acme"
            modules = (module,)
            install = "see acme.example"

        Acme.name, Acme.requires = "acme", (f"{name}>=2.1",)
        return Acme(), name, module

    return make


def refused(accelerator):
    with pytest.raises(UnsupportedError) as caught:
        accelerator.activate()
    assert caught.value.given == "Accelerator 'acme'"
    return caught.value


def test_an_old_sdk_is_refused_by_metadata_and_never_imported(install):
    acme, name, module = install("raise SystemExit('imported')", version="2.0")
    error = refused(acme)
    assert error.why == f"{name} 2.0 is installed, and {name}>=2.1 is needed"
    assert error.fix == f"Run `pip install --upgrade '{name}>=2.1'`"
    assert acme.why_unavailable() == f"{error.why}. {error.fix}"
    assert module not in __import__("sys").modules


def test_an_sdk_for_another_torch_is_refused_by_metadata_and_never_imported(install):
    acme, name, _ = install("raise SystemExit('imported')", requires=["torch==1.13.*", "torch<1; extra == 'old'"])
    error = refused(acme)
    assert f"{name} 3.0 requires torch==1.13.*, and torch " in error.why
    assert "for this torch" in error.fix
    assert not acme.is_available()


def test_a_fitting_or_silent_sdk_is_not_refused(install):
    _, name, _ = install("", requires=["torch>=2.11"])
    assert sdk.misfit([f"{name}>=2.1"]) is None
    assert sdk.misfit(["acme-that-is-absent>=1"]) is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(3)", "it called exit(3)"),
        ("import sys; sys.exit('driver too old')", "it called exit('driver too old')"),
        ("raise OSError('libacme.so: cannot open')", "OSError: libacme.so: cannot open"),
        ("import acme_part_that_is_absent", "No module named 'acme_part_that_is_absent'"),
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    ],
)
def test_an_import_that_ends_badly_is_caught_and_named(install, capfd, source, said):
    acme, _, module = install(f"print('a banner')\n{source}")
    error = refused(acme)
    assert error.why == f"Importing {module} failed: {error.why.rpartition('failed: ')[2]}"
    assert said in error.why
    assert error.fix == "see acme.example"
    assert capfd.readouterr().out == ""


def test_an_sdk_that_torch_has_not_loaded_is_told(install, monkeypatch):
    acme, _, module = install("")
    assert acme.why_unavailable() == f"{module} is installed, but torch has not loaded it; import it first"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert acme.why_unavailable().endswith("unset TORCH_DEVICE_BACKEND_AUTOLOAD='0'")


def test_a_device_module_that_exits_when_asked_is_told(monkeypatch):
    class Leaving(TorchAccelerator):
        name = device_type = "leaving"

        def absence(self):
            raise SystemExit(4)

    assert not Leaving().is_available()
    assert "it called exit(4)" in Leaving().why_unavailable()


def test_dotted_modules_are_looked_for_by_their_first_part():
    assert sdk.missing_modules(["os.path", "acme_absent.torch"]) == ["acme_absent.torch"]
