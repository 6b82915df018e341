"""Threaded I/O: positional reads and writes of host tensors on a pool of threads, on any system.

Notable: bytes go straight between the tensor's memory and the system call, which releases the interpreter lock; no
copy is made and every dtype works. A large transfer is cut into chunks that several threads move at once.
"""

from polyscale_standard.io.plugin import ThreadsPlugin
from polyscale_standard.io.threads import ThreadsIO

__all__ = ["ThreadsIO", "ThreadsPlugin"]
