"""``sparse_attention``: block-sparse attention layouts."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Block-sparse attention.",
    {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": False,
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
    },
    nearest="torch.nn.attention.flex_attention in the model",
    presence=True,
)
