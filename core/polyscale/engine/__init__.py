"""The engine: what a training script holds.

Read in this order: ``initialize`` (how it is put together), ``engine`` (what a script calls), ``accumulation`` (what a
micro-step is), ``update`` (norm, clipping, overflow, optimizer), ``optimizer`` (where it comes from), ``saving`` and
``loading`` (checkpoints), ``observing`` (events).
"""
