"""``curriculum_learning``: the older, top-level form."""

from polyscale.config.unbuilt.table import FREE, not_built

SECTION = not_built(
    "Grow the sequence length while training.",
    {
        "enabled": False,
        "curriculum_type": "seqlen",
        "min_difficulty": None,
        "max_difficulty": None,
        "schedule_type": None,
        "schedule_config": FREE,
    },
    nearest="a dataset that is ordered by difficulty, given to polyscale.data.loader",
)
