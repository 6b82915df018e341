"""Hook specs: one for each kind, with one signature; and what a plugin does wrong with them."""

import inspect
import itertools

import pytest

from polyscale.discovery import installed, load
from polyscale.errors import PluginError
from polyscale.hooks import HookSpecs
from polyscale.kinds import KINDS
from polyscale.testing.distributions import write_distribution

_NUMBERS = itertools.count()


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    def install(body):
        module = f"acme_hooks_{next(_NUMBERS)}"
        source = f"from polyscale.hooks import hookimpl\n\nclass Plugin:\n    interface_version = (1, 0)\n{body}"
        folder = write_distribution(
            tmp_path / module,
            "acme-hooks",
            entry_points={"polyscale.io": {"hooked": f"{module}:Plugin"}},
            modules={module: source},
        )
        monkeypatch.syspath_prepend(str(folder))

    return install


def refusal():
    with pytest.raises(PluginError) as caught:
        load("io", "hooked")
    assert "acme-hooks 1.0" in caught.value.given
    return caught.value


def test_every_kind_has_one_documented_hook_and_no_other_exists():
    hooks = {name: value for name, value in vars(HookSpecs).items() if inspect.isfunction(value)}
    assert sorted(hooks) == sorted(kind.hook for kind in KINDS.values())
    for kind in KINDS.values():
        function = hooks[kind.hook]
        assert list(inspect.signature(function).parameters) == ["self", "context"]
        assert kind.group in function.__doc__
        assert function.__annotations__["return"] == kind.protocol.split(":")[1]
        assert kind.protocol_type().__doc__


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"op"}))
def test_every_kind_has_a_real_user(kind):
    assert installed(kind)


def test_misspelt_hook_is_named_with_the_right_spelling(plugin):
    plugin("    @hookimpl\n    def polyscale_oi(self, context): ...\n")
    error = refusal()
    assert "polyscale_oi" in error.why
    assert "Rename polyscale_oi to polyscale_io" in error.fix


def test_unmarked_hook_is_told(plugin):
    plugin("    def polyscale_io(self, context): ...\n")
    assert refusal().why == "polyscale_io is not marked with @hookimpl"


def test_hook_of_another_kind_is_told(plugin):
    plugin("    @hookimpl\n    def polyscale_observer(self, context): ...\n")
    assert refusal().why == "polyscale_io is not implemented"


def test_two_implementations_are_refused(plugin):
    plugin(
        "    @hookimpl\n    def polyscale_io(self, context): return 1\n"
        "    @hookimpl(specname='polyscale_io')\n    def again(self, context): return 2\n"
    )
    assert "exactly one" in refusal().why


def test_wrapper_is_refused(plugin):
    plugin("    @hookimpl(wrapper=True)\n    def polyscale_io(self, context):\n        return (yield)\n")
    assert "not as a wrapper" in refusal().why


def test_hook_with_an_unknown_argument_is_refused(plugin):
    plugin("    @hookimpl\n    def polyscale_io(self, context, options): ...\n")
    assert "options" in refusal().why


def test_constructor_that_needs_arguments_is_refused(plugin):
    plugin("    def __init__(self, x): ...\n    @hookimpl\n    def polyscale_io(self, context): ...\n")
    assert "TypeError" in refusal().why


def test_only_the_asked_plugin_is_called(plugin, tmp_path):
    mark = tmp_path / "called"
    plugin(f"    @hookimpl\n    def polyscale_io(self, context): open({str(mark)!r}, 'w').close()\n")
    refusal()
    mark.unlink()
    load("io", "threads").close()
    assert not mark.exists()
