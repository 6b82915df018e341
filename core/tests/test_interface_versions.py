"""Interface versions: equal major and a minor that is not newer than core's."""

import dataclasses
import itertools

import pytest

from polyscale.discovery import load, plugin_info
from polyscale.errors import PluginError
from polyscale.kinds import KINDS
from polyscale.testing.distributions import write_distribution

_NUMBERS = itertools.count()
SOURCE = """
    from polyscale.hooks import hookimpl

    class Made:
        name = "v"
        def enabled(self): return True
        def on_event(self, event): pass
        def close(self): pass

    class Plugin:
        {stated}
        def __init__(self):
            assert {accepted}, "a refused plugin is never made"
        @hookimpl
        def polyscale_observer(self, context):
            return Made()
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "observer", dataclasses.replace(KINDS["observer"], version=(2, 3)))

    def install(stated, *, accepted):
        module = f"acme_version_{next(_NUMBERS)}"
        folder = write_distribution(
            tmp_path / module,
            "acme-version",
            entry_points={"polyscale.observer": {"versioned": f"{module}:Plugin"}},
            modules={module: SOURCE.format(stated=stated, accepted=accepted)},
        )
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.mark.parametrize("version", [(2, 3), (2, 2), (2, 0)])
def test_same_or_older_minor_works(plugin, version):
    plugin(f"interface_version = {version}", accepted=True)
    assert plugin_info("observer", "versioned").interface_version == version
    assert load("observer", "versioned").enabled()


@pytest.mark.parametrize(
    ("version", "upgrade"),
    [((2, 4), "polyscale-core"), ((3, 0), "polyscale-core"), ((1, 3), "acme-version"), ((1, 9), "acme-version")],
)
def test_newer_minor_and_other_major_are_refused_with_what_to_upgrade(plugin, version, upgrade):
    plugin(f"interface_version = {version}", accepted=False)
    with pytest.raises(PluginError) as caught:
        load("observer", "versioned")
    assert f"interface {version[0]}.{version[1]} of observer plugins" in caught.value.why
    assert "speaks 2.3" in caught.value.why
    assert f"pip install --upgrade {upgrade}`" in caught.value.fix


@pytest.mark.parametrize("stated", ["pass", "interface_version = '2.3'", "interface_version = (2,)"])
def test_version_that_is_absent_or_malformed_is_refused(plugin, stated):
    plugin(stated, accepted=False)
    with pytest.raises(PluginError) as caught:
        load("observer", "versioned")
    assert "interface_version" in caught.value.why
    assert "interface_version = (2, 3)" in caught.value.fix
