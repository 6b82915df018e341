"""``timers``: samples per second."""

from polyscale.config.unbuilt.table import no_effect

SECTION = no_effect(
    "Measure samples per second.",
    {"throughput": {"enabled": True, "synchronized": True}},
    reason="observers get samples and times with every update, and compute rates from them",
)
