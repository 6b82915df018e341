"""Loading plugins, good and bad: each bad one is a real distribution on ``sys.path``."""

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from polyscale.discovery import installed, load, plugin_info
from polyscale.errors import ConfigError, PluginError
from polyscale.hooks import PluginContext
from polyscale.testing.distributions import write_distribution

_NUMBERS = itertools.count()
GOOD = """
    from polyscale.hooks import hookimpl

    class Made:
        name = "seen"
        def __init__(self, context): self.context = context
        def enabled(self): return True
        def on_event(self, event): pass
        def close(self): pass

    class Plugin:
        interface_version = (1, 0)
        @hookimpl
        def polyscale_observer(self, context):
            return Made(context)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Install a module as a plugin (an observer called ``odd``, unless told otherwise) and return the module's name."""

    def install(source, *, name="odd", dist="acme-odd", kind="observer", attribute="Plugin", requires=()):
        number = next(_NUMBERS)
        module = f"acme_module_{number}"
        folder = write_distribution(
            tmp_path / str(number),
            dist,
            entry_points={f"polyscale.{kind}": {name: f"{module}:{attribute}"}},
            modules={module: source},
            requires=requires,
        )
        monkeypatch.syspath_prepend(str(folder))
        return module

    return install


def refusal(name="odd", kind="observer"):
    with pytest.raises(PluginError) as caught:
        load(kind, name)
    error = caught.value
    assert name in error.given or name in str(error)
    assert error.fix
    return error


def test_good_plugin_is_handed_its_context(plugin):
    plugin(GOOD)
    made = load("observer", "odd", PluginContext("other", {"path": "x"}))
    assert (made.context.name, made.context.options) == ("odd", {"path": "x"})
    assert load("observer", "odd").context.options == {}, "each load calls the hook with its own context"


def test_listing_names_kind_distribution_and_version(plugin):
    module = plugin("raise RuntimeError('listing must import nothing')")
    (entry,) = [entry for entry in installed("observer") if entry.name == "odd"]
    assert (entry.distribution, entry.version, entry.group) == ("acme-odd", "1.0", "polyscale.observer")
    assert entry.value == f"{module}:Plugin"
    assert module not in sys.modules


def test_import_that_raises_is_named_with_its_cause(plugin):
    plugin("import a_module_that_does_not_exist")
    error = refusal()
    assert "acme-odd 1.0" in error.given
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in error.why
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "pip uninstall acme-odd" in error.fix


def test_import_that_exits_is_an_error(plugin):
    plugin("import sys; sys.exit(3)")
    assert "it called exit(3)" in refusal().why


def test_keyboard_interrupt_during_import_passes(plugin):
    plugin("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("observer", "odd")


def test_prints_during_import_do_not_reach_stdout(plugin, capfd, caplog):
    plugin(
        "import ctypes, os\nprint('from python')\nos.write(1, b'from a descriptor\\n')\n"
        "ctypes.CDLL(None).printf(b'from c\\n')\n" + textwrap.dedent(GOOD)
    )
    with caplog.at_level(logging.INFO, logger="polyscale"):
        load("observer", "odd")
    print("our own result")
    captured = capfd.readouterr()
    assert captured.out == "our own result\n"
    assert "from a descriptor" in captured.err
    assert "from c" in captured.err
    assert "from python" in caplog.text


def test_hook_that_prints_exits_or_raises_is_contained(plugin, capfd):
    plugin(GOOD.replace("return Made(context)", "print('noise'); raise SystemExit('gone')"))
    assert "it called exit('gone')" in refusal().why
    assert capfd.readouterr().out == ""
    plugin(GOOD.replace("return Made(context)", "return context.absent"), name="raising", dist="acme-raising")
    assert "AttributeError" in refusal("raising").why


def test_errors_of_polyscales_own_pass_through_a_hook(plugin):
    source = "from polyscale.errors import ConfigError\n" + textwrap.dedent(GOOD)
    plugin(
        source.replace("return Made(context)", "raise ConfigError('devices = 0')"), name="strict", dist="acme-strict"
    )
    with pytest.raises(ConfigError, match="devices = 0"):
        load("observer", "strict")


def test_two_distributions_of_one_name_are_both_named(plugin):
    plugin(GOOD, dist="acme-first")
    plugin(GOOD, dist="acme-second")
    error = refusal()
    assert "acme-first 1.0" in error.why
    assert "acme-second 1.0" in error.why


def test_the_first_copy_of_one_distribution_hides_the_second(plugin):
    plugin(GOOD, dist="Acme.Odd")
    newer = plugin(GOOD, dist="acme-odd")
    assert plugin_info("observer", "odd").plugin.__module__ == newer


def test_unreadable_metadata_of_another_distribution_hides_nothing(plugin, tmp_path, monkeypatch):
    plugin(GOOD)
    write_distribution(tmp_path / "bad", "acme-bad", entry_points={"polyscale.observer": {"bad": "x:y"}})
    (tmp_path / "bad/acme_bad-1.0.dist-info/entry_points.txt").write_text("[polyscale.observer\nno equals sign")
    (tmp_path / "bad/acme_worse-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "bad"))
    assert load("observer", "odd").enabled()


def test_unknown_name_tells_nearest_and_installed_names():
    error = refusal("adamww", kind="optimizer")
    assert "Did you mean 'adamw'?" in error.fix
    assert "adagrad, adam, adamw" in error.fix
    assert "pip install" in error.fix


def test_pip_line_names_the_distribution_of_a_known_backend_and_no_stranger(tmp_path):
    code = (
        "import sys, importlib.metadata as metadata\n"
        "from polyscale.discovery import load, installed\n"
        "from polyscale.discovery import missing\n"
        "keep = missing.installed\n"
        "missing.installed = lambda kind: [entry for entry in keep(kind) if entry.name == 'cpu']\n"
        "print(missing.unknown('accelerator', 'cuda'))\n"
        "print(missing.unknown('accelerator', 'cdua'))\n"
        "print(missing.unknown('accelerator', 'requests'))\n"
    )
    exact, near, stranger = run_python(code, tmp_path).splitlines()
    assert "`pip install polyscale-backend-cuda`" in exact
    assert "Did you mean 'cuda'? Installed: cpu. Run `pip install polyscale-backend-cuda`" in near
    assert "requests`" not in stranger
    assert "pip install 'polyscale[all]'" in stranger


def test_unknown_kind_is_an_error():
    with pytest.raises(PluginError, match="Did you mean 'optimizer'"):
        load("optimiser", "adamw")


@pytest.mark.parametrize("indirect", [False, True])
def test_plugin_for_another_torch_is_refused_before_it_is_imported(plugin, tmp_path, monkeypatch, indirect):
    mark = tmp_path / "imported"
    pins = ["torch==1.13.*"]
    if indirect:
        write_distribution(tmp_path / "sdk", "acme-sdk", entry_points={}, requires=pins)
        monkeypatch.syspath_prepend(str(tmp_path / "sdk"))
    source = f"import os\nopen({str(mark)!r}, 'w').close()\nos._exit(7)"
    dist = f"acme-odd-{indirect}"
    plugin(source, dist=dist, requires=["acme-sdk"] if indirect else pins)
    error = refusal()
    assert f"{'acme-sdk' if indirect else dist} requires torch==1.13.*, and torch " in error.why
    assert not mark.exists()


def test_requirements_that_fit_or_do_not_apply_are_no_obstacle(plugin):
    plugin(
        GOOD, dist="acme-fits", requires=["torch>=2", 'torch==1.0; extra == "old"', 'torch==1.0; python_version<"3"']
    )
    assert load("observer", "odd").enabled()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("return Made(context)", "return None"), "handed over nothing"),
        (("return Made(context)", "return Made"), "handed over the class Made"),
        (("return Made(context)", "return {}"), "handed over a dict, which lacks name, enabled(), on_event()"),
        (("def on_event(self, event): pass", ""), "handed over a Made, which lacks on_event()"),
        (("def on_event(self, event): pass", "on_event = 3"), "handed over a Made, which lacks on_event()"),
        (('name = "seen"', ""), "handed over a Made, which lacks name"),
    ],
)
def test_wrong_object_is_refused_with_what_it_lacks(plugin, change, said):
    plugin(GOOD.replace(*change))
    assert said in refusal().why


def test_proxies_and_inherited_members_count(plugin):
    plugin(
        GOOD.replace("return Made(context)", "return Proxy(Made(context))")
        + """
    class Proxy:
        def __init__(self, inner): self.inner = inner
        def __getattr__(self, name): return getattr(self.__dict__["inner"], name)
    """
    )
    assert load("observer", "odd").enabled()


def test_entry_point_to_a_function_is_refused(plugin):
    plugin("def Plugin(): raise AssertionError('never called')")
    assert "names a function, not a class" in refusal().why


def test_entry_point_to_nothing_is_refused(plugin):
    plugin("x = 1")
    assert "has no attribute 'Plugin'" in refusal().why


def test_listing_and_loading_import_no_torch_and_write_no_cache(tmp_path):
    code = """
        import sys
        import polyscale, polyscale.discovery as discovery
        for kind in ("accelerator", "optimizer", "io"):
            assert discovery.installed(kind)
        assert "stevedore" not in sys.modules
        discovery.load("accelerator", "cpu").memory()
        discovery.load("communication", "gloo")
        assert "torch" not in sys.modules, "torch was imported"
        print("fine")
    """
    assert run_python(textwrap.dedent(code), tmp_path, RANK="0", WORLD_SIZE="2") == "fine\n"
    assert list(tmp_path.iterdir()) == []


def test_a_plugin_that_failed_does_not_spoil_the_next(plugin):
    plugin(GOOD.replace("def polyscale_observer", "def polyscale_obsever"), name="bad", dist="acme-bad")
    plugin(GOOD)
    refusal("bad")
    with contextlib.suppress(PluginError):
        load("observer", "bad")
    assert load("observer", "odd").enabled()


def run_python(code, home, **env):
    """Run ``code`` in a fresh interpreter whose home is ``home``; returns its stdout."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**clean, **env, "HOME": str(home)}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
