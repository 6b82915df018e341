"""What ``benchmarks/zero.py`` is made of.

Read in this order: ``configurations`` (what is compared), ``sides`` (one training step of each), ``rank`` (the process
of one rank), ``nursery`` (what forks it), ``pairs`` (the parent's hold on both), ``traffic`` (bytes of one step),
``memory``, ``rounds`` (who is measured when), ``summary`` (medians, ratios, the table), ``picture``.
"""
