"""``aio``: asynchronous I/O with NVMe. ``thread_count`` and ``num_threads`` are written by other tools."""

from polyscale.config.unbuilt.table import no_effect

SECTION = no_effect(
    "Options of asynchronous I/O.",
    {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
        "thread_count": 1,
        "num_threads": 1,
    },
    reason="nothing is offloaded to NVMe; options of an I/O plugin stand in backends.options",
)
