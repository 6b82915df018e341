"""Where a thread is: what it does in the engine's words, and the line of the user's code.

Notable: entering and leaving a phase only writes attributes, so the engine can say what it does for every forward,
backward and step; the text is put together when a message needs it.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

_WAITING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "polyscale.control.agreement",
)
"""Modules whose innermost frame means that a thread which computes nothing waits for other ranks."""
_LEFT = "_polyscale_place"
"""Attribute of an exception: the place whose phase it left first."""


class Place:
    """What the training thread is doing. Written by that thread, read by the watchdog's.

    Attributes:
        phase: "forward", "backward", "step", "save tag 'x'"; "" outside the engine.
        detail: module or unit and collective, as last noted in this phase ("transformer.h.3 reduce_scatter").
        since: monotonic time of the last change of phase.
        thread: identity of the thread that entered the phase.
        step: updates done so far.
    """

    __slots__ = ("detail", "phase", "since", "step", "thread")

    def __init__(self) -> None:
        self.phase = ""
        self.detail = ""
        self.since = time.monotonic()
        self.thread: int = threading.main_thread().ident or 0
        self.step = 0

    def __str__(self) -> str:
        phase = f"in {self.phase}" if self.phase else "outside the engine"
        return phase + (f", at {self.detail}" if self.detail else "") + f" (steps done: {self.step})"

    def of(self, exception: BaseException) -> str:
        """Where the thread was when ``exception`` was raised: by now it may have left the phase."""
        return left(exception) or str(self)

    def line(self) -> str:
        """The line of the user's code that the thread is at, or ""."""
        frame = sys._current_frames().get(self.thread)
        return user_line(_outwards(frame)) if frame is not None else ""

    def waits_for_ranks(self) -> bool:
        """Whether the thread is inside a call that other ranks must answer, as far as Python's frames tell."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name in _WAITING:
                return True
            if name.partition(".")[0] != "torch":
                return False
            frame = frame.f_back
        return False


class Phase:
    """A stretch of work; a context manager that gives back the phase around it."""

    __slots__ = ("_before", "_name", "_place")

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._name = name
        self._before = ("", "")

    def __enter__(self) -> Phase:
        place = self._place
        self._before = (place.phase, place.detail)
        place.phase = self._name
        place.detail = ""
        place.thread = threading.get_ident()
        place.since = time.monotonic()
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        place = self._place
        if exception is not None and not left(exception):
            with contextlib.suppress(AttributeError, TypeError):  # a class may refuse attributes
                setattr(exception, _LEFT, str(place))
        place.phase, place.detail = self._before
        place.since = time.monotonic()

    def note(self, detail: str) -> None:
        """Say at which module or unit, and in which collective. Writes an attribute only; kept to the phase's end."""
        self._place.detail = detail


def left(exception: BaseException) -> str:
    """The place whose phase ``exception``, or its cause, left first, or "" when it was raised outside of all."""
    place: str = getattr(exception, _LEFT, "")
    return place or (left(exception.__cause__) if exception.__cause__ is not None else "")


def line_of_exception(exception: BaseException) -> str:
    """The innermost line of the user's code that raised an exception or called what did, or ""."""
    return user_line(_from_traceback(exception.__traceback__))


def user_line(frames: list[tuple[FrameType, int]]) -> str:
    """``file:line in function (module name)`` of the first frame, innermost first, that is neither torch, polyscale
    nor the standard library; else of the innermost of all."""
    for frame, line in [*(pair for pair in frames if _is_user_code(pair[0])), *frames[:1]]:
        name = frame.f_globals.get("__name__", "?")
        return f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name} (module {name})"
    return ""


def _outwards(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _from_traceback(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Frames, innermost first: those that the exception has left so far, and those around them."""
    around = _outwards(traceback.tb_frame.f_back) if traceback is not None else []
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames[::-1] + around


def _is_user_code(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package == "torch" or package.startswith("polyscale"):
        return False
    file = frame.f_code.co_filename
    if file.startswith("<frozen"):
        return False
    return "site-packages" in file or not file.startswith(_standard_library())


@cache
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["platstdlib"]})


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
