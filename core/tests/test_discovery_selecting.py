"""Choosing plugins: names, ``auto``, the environment, and what is said about those that were not chosen."""

import itertools
import logging

import pytest

from polyscale.discovery import Attempt, choose, choose_accelerator, load, select, select_accelerator
from polyscale.errors import PluginError
from polyscale.testing.distributions import write_distribution

_NUMBERS = itertools.count()
ACCELERATOR = """
    from polyscale.hooks import hookimpl
    from polyscale.torch_accelerator import TorchAccelerator

    class Made(TorchAccelerator):
        name = device_type = "{name}"
        auto = {auto}
        def is_available(self):
            {available}
        def why_unavailable(self):
            return "its cable is unplugged"

    class Plugin:
        interface_version = (1, 0)
        @hookimpl
        def polyscale_accelerator(self, context):
            made = Made()
            made.options = context.options
            return made
"""


@pytest.fixture
def accelerator(tmp_path, monkeypatch):
    """Install an accelerator by name."""

    def install(name, *, auto=True, available="return True", source=ACCELERATOR):
        module = f"acme_choice_{next(_NUMBERS)}"
        folder = write_distribution(
            tmp_path / module,
            f"acme-{name}",
            entry_points={"polyscale.accelerator": {name: f"{module}:Plugin"}},
            modules={module: source.format(name=name, auto=auto, available=available)},
        )
        monkeypatch.syspath_prepend(str(folder))

    return install


@pytest.fixture(autouse=True)
def no_real_device(monkeypatch):
    monkeypatch.delenv("POLYSCALE_ACCELERATOR", raising=False)
    if choose_accelerator("cpu").name != "cpu" or load("accelerator", "cuda").is_available():
        pytest.skip("auto means another device on this machine")


def test_auto_without_a_device_is_cpu_said_once_with_the_reasons(accelerator, caplog):
    accelerator("absent", available="return False")
    with caplog.at_level(logging.INFO, logger="polyscale"):
        assert select_accelerator().name == "cpu"
        assert select_accelerator().name == "cpu"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("Accelerator: cpu (not absent: its cable is unplugged; cuda: ")


def test_auto_takes_the_one_device_that_is_available(accelerator):
    accelerator("first")
    accelerator("absent", available="return False")
    accelerator("standin", auto=False)
    choice = choose_accelerator()
    assert choice.name == choice.object.name == "first"
    assert Attempt("absent", False, "its cable is unplugged") in choice.attempts
    assert Attempt("standin", False, "used only when named") in choice.attempts


def test_two_available_devices_are_a_question_to_the_user(accelerator):
    accelerator("first")
    accelerator("second")
    with pytest.raises(PluginError) as caught:
        select_accelerator()
    assert "first, second" in caught.value.given
    assert '"backends": {"accelerator": "first"}' in caught.value.fix
    assert "POLYSCALE_ACCELERATOR=first" in caught.value.fix


def test_auto_survives_a_broken_accelerator_and_warns(accelerator, caplog):
    accelerator("broken", source="raise OSError('libacme.so is missing')")
    with caplog.at_level(logging.INFO, logger="polyscale"):
        assert select_accelerator().name == "cpu"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "broken" in warning.getMessage()
    assert "libacme.so is missing" in warning.getMessage()
    assert "pip uninstall acme-broken" in warning.getMessage()


def test_availability_that_raises_or_exits_counts_as_unavailable(accelerator):
    accelerator("raising", available="raise SystemExit(1)")
    attempts = {attempt.name: attempt for attempt in choose_accelerator().attempts}
    assert "it called exit(1)" in attempts["raising"].why


def test_named_accelerator_that_cannot_be_used_is_an_error_with_the_cause(accelerator):
    accelerator("absent", available="return False")
    with pytest.raises(PluginError) as caught:
        select_accelerator("absent")
    assert caught.value.why == "its cable is unplugged"
    assert "cpu" in caught.value.fix
    accelerator("broken", source="raise OSError('libacme.so is missing')")
    with pytest.raises(PluginError, match=r"libacme\.so is missing"):
        select_accelerator("broken")


def test_environment_wins_over_the_configuration_and_is_named_in_the_error(accelerator, monkeypatch):
    accelerator("first")
    accelerator("absent", available="return False")
    monkeypatch.setenv("POLYSCALE_ACCELERATOR", "cpu")
    assert select_accelerator("first").name == "cpu"
    monkeypatch.setenv("POLYSCALE_ACCELERATOR", "absent")
    with pytest.raises(PluginError, match="POLYSCALE_ACCELERATOR"):
        select_accelerator("cpu")


def test_standin_is_used_when_named(accelerator):
    accelerator("standin", auto=False)
    assert select_accelerator("standin").name == "standin"


def test_misspelt_accelerator_tells_the_nearest():
    with pytest.raises(PluginError, match="Did you mean 'cuda'"):
        select_accelerator("cdua")


def test_select_tries_names_in_order_and_says_why_each_was_rejected():
    choice = choose("communication", default=["absent", "mpi", "gloo"])
    if choice.name == "gloo":
        assert [attempt.name for attempt in choice.attempts] == ["absent", "mpi", "gloo"]
        assert choice.attempts[0].why == "not installed"
        assert "has no backend mpi" in choice.attempts[1].why
    with pytest.raises(PluginError) as caught:
        select("communication", default=["absent", "hccl"])
    assert "absent: not installed; hccl: this torch" in caught.value.why
    assert "gloo" in caught.value.fix


def test_select_by_name_ignores_the_default_order():
    assert select("communication", "gloo", default=["mpi"]).name == "gloo"
    with pytest.raises(PluginError, match="has no backend hccl"):
        select("communication", "hccl", default=["gloo"])


def test_options_of_the_chosen_name_are_given_to_it(accelerator):
    from polyscale.config import load_config
    from polyscale.hooks import PluginContext

    accelerator("first")
    settings = {"train_batch_size": 1, "backends": {"options": {"first": {"devices": 3}, "cpu": {"devices": 9}}}}
    context = PluginContext("", config=load_config(settings))
    assert select_accelerator(context=context).options == {"devices": 3}
