"""``activation_checkpointing``: read by ``deepspeed.checkpointing`` only."""

from polyscale.config.unbuilt.table import no_effect

SECTION = no_effect(
    "Options of deepspeed.checkpointing.",
    {
        "partition_activations": False,
        "number_checkpoints": None,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": False,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    reason="it configures deepspeed.checkpointing alone; recompute in the model, with torch.utils.checkpoint",
)
