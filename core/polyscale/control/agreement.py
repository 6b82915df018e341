"""Control: agreement between ranks through the store, with a timeout, never through a collective.

Notable: a collective that one rank does not join waits until the process group gives up and then says nothing useful;
here every rank writes its value under a key, rank 0 compares them and publishes one verdict, and who did not come is
named. Each call is 4 to 5 store requests per rank, and values may be large: equality is that of digests, and a value
goes to the store once. A name is used in step by all ranks: the n-th call of a name on one rank meets the n-th call on
the others. Waiting polls, because a blocking wait would lock the store's connection.
"""

from __future__ import annotations

import hashlib
import json
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from polyscale import env
from polyscale.control import explanations, pieces
from polyscale.control.waits import Seen
from polyscale.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from polyscale.control.events import Event

# Rank 0 gives its verdict at the timeout; the others wait a little longer for it.
_VERDICT_EXTRA_S = 5.0
_POLL_FIRST_S = 0.0005
_POLL_MOST_S = 0.05
_SHOWN = 200
_FIRST = "first"


class Control:
    """What ranks tell one another.

    Attributes:
        store: a c10d store in polyscale's own namespace.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: seconds that ranks wait for one another.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout_s: float | None = None) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = env.timeout_s() if timeout_s is None else timeout_s
        self.watch: Any = None  # the watch that all watchdogs of this control share
        self._calls: dict[str, int] = {}
        self._published: dict[str, str] = {}  # on rank 0: kind and name -> key of the latest verdict

    def agree(self, name: str, value: Any, *, what: str) -> None:
        """Check that every rank gives an equal ``value`` (compared as JSON).

        Args:
            name: which agreement this is; all ranks use the same.
            value: what must be equal; JSON-able.
            what: the value in words, for the error ("configuration").

        Raises:
            RankError: on every rank, when two values differ (names both ranks and values) or a rank does not come.
        """
        text = json.dumps(value, sort_keys=True)
        digests = self._exchange(f"agree/{name}", hashlib.sha256(text.encode()).hexdigest(), what=what)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        own = value if self.rank in (0, other) else None
        values = self._exchange(f"differs/{name}", own, what=what)
        raise _different(what, values[0], values[other], other)

    def share(self, name: str, value: Any, *, what: str = "") -> list[Any]:
        """Return the ``value`` of every rank, in rank order, after a trip through JSON.

        Raises:
            RankError: a rank does not come in time.
        """
        return self._exchange(name, value, what=what or name)

    def decide(self, name: str, value: Any, *, what: str = "") -> Any:
        """Return rank 0's ``value`` on every rank, after a trip through JSON; the others' is not looked at.

        Raises:
            RankError: rank 0 does not come in time.
        """
        text = json.dumps(value if self.rank == 0 else None)
        if self.world_size == 1:
            return json.loads(text)
        key = self._key("decide", name)
        if self.rank == 0:
            self._publish(key, text)
            return json.loads(text)
        text = self._from_first(f"{key}/verdict", what or name)
        self._done(key, [])
        return json.loads(text)

    def introduce(self, value: Any, *, what: str) -> Any:
        """Return what rank 0 has said about itself, which is ``value`` there; however often, it is said once.

        Unlike ``decide`` this is not in step: rank 0 does not wait, and a rank may ask again, or later than others.

        Raises:
            RankError: rank 0 does not come in time, or the store is gone.
        """
        if self.rank == 0:
            self.call(pieces.write, self.store, _FIRST, json.dumps(value))
            return value
        return json.loads(self._from_first(_FIRST, what))

    def _from_first(self, key: str, what: str) -> str:
        if not self._wait([key], self.timeout_s, {0: key}):
            raise self._missing(what, [0])
        (text,) = self._read([key])
        return text

    def _exchange(self, name: str, value: Any, *, what: str) -> list[Any]:
        text = json.dumps(value, sort_keys=True)
        if self.world_size == 1:
            return [json.loads(text)]
        key = self._key("exchange", name)
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        self.call(pieces.write, self.store, keys[self.rank], text)
        texts, missing = self._judge(key, keys) if self.rank == 0 else self._await_verdict(key, keys)
        if missing:
            raise self._missing(what, missing)
        return [json.loads(text) for text in texts]

    def _judge(self, key: str, keys: list[str]) -> tuple[list[str], list[int]]:
        missing = [] if self._wait(keys, self.timeout_s, dict(enumerate(keys))) else self._absent(keys)
        texts = [] if missing else self._read(keys)  # before the verdict, after which others may clear them
        self._publish(key, json.dumps(missing))
        if missing:
            del self._published[key.rpartition("/")[0]]  # who did not come may never read it
        return texts, missing

    def _await_verdict(self, key: str, keys: list[str]) -> tuple[list[str], list[int]]:
        verdict_key = f"{key}/verdict"
        if not self._wait([verdict_key], self.timeout_s + _VERDICT_EXTRA_S, {0: verdict_key}):
            return [], self._absent(keys) or [0]
        (verdict,) = self._read([verdict_key])
        missing: list[int] = json.loads(verdict)
        texts = [] if missing else self._read(keys)
        self._done(key, [] if missing else keys)
        return texts, missing

    def _publish(self, key: str, text: str) -> None:
        self.call(pieces.write, self.store, f"{key}/verdict", text)
        self._published[key.rpartition("/")[0]] = key

    def finish(self, seconds: float) -> None:
        """On rank 0, whose process may hold the store: wait until the others have read the latest verdicts."""
        end = time.monotonic() + seconds
        for key in self._published.values():
            while self.call(self.store.check, [f"{key}/verdict"]) and time.monotonic() < end:
                time.sleep(0.005)
        self._published.clear()

    def _read(self, keys: list[str]) -> list[str]:
        texts: list[str] = self.call(pieces.read, self.store, keys)
        return texts

    def _done(self, key: str, keys: list[str]) -> None:
        """Say that this rank has read the verdict and ``keys``; the last reader clears them: the store stays small.

        The verdict goes last: once it is gone, rank 0 may end, and the store with it.
        """
        readers = self.call(self.store.add, f"{key}/readers", 1)
        if readers == self.world_size - 1:
            self.call(pieces.delete, self.store, keys)
            self.call(self.store.delete_key, f"{key}/readers")
            self.call(pieces.delete, self.store, [f"{key}/verdict"])

    def _key(self, kind: str, name: str) -> str:
        number = self._calls.get(f"{kind}/{name}", 0)
        self._calls[f"{kind}/{name}"] = number + 1
        return f"{kind}/{name}/{number}"

    def _absent(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.call(self.store.check, [key])]

    def _wait(self, keys: list[str], seconds: float, by: dict[int, str]) -> bool:
        """Wait for ``keys``; False when the time is over, or a rank has ended without writing its own (``by`` rank)."""
        end = time.monotonic() + seconds
        pause = _POLL_FIRST_S
        while not self.call(self.store.check, keys):
            # It wrote all that it ever will before it said that it ends.
            ended = any(rank in by and not self.call(self.store.check, [by[rank]]) for rank in self._ended())
            if ended or time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_MOST_S)
        return True

    def call(self, request: Any, *arguments: Any) -> Any:
        """Do a request to the store.

        Raises:
            RankError: the store is gone, or did not answer in time.
        """
        try:
            return request(*arguments)
        except RuntimeError as error:  # c10d's store errors are RuntimeErrors
            ended = "The process that holds it has probably ended"
            why = "It did not answer in time" if has_timed_out(error) else ended
            raise RankError(
                f"rank {self.rank} cannot reach the store of the process group",
                why=f"{why} ({_first_line(error)})",
                fix="Look at what rank 0 and the launcher printed",
            ) from error

    def _ended(self) -> dict[int, Event]:
        """Ranks whose processes have ended in order, as far as the watch has heard."""
        if self.watch is None:
            return {}
        left: dict[int, Event] = dict(self.watch.peers.left)
        return {rank: event for rank, event in left.items() if event.last or event.code}

    def _missing(self, what: str, ranks: list[int]) -> RankError:
        ended = self._ended()
        if found := [ended[rank] for rank in ranks if rank in ended]:
            return explanations.ended(what, self.rank, found)
        names = ", ".join(map(str, ranks))
        seen = "".join(
            f"; rank {rank} was last seen {doing}" for rank in ranks[:3] if (doing := self.last_seen(rank)) is not None
        )
        return RankError(
            f"{what}: rank {names} of {self.world_size} did not come within {self.timeout_s:g} s"
            if len(ranks) == 1
            else f"{what}: ranks {names} of {self.world_size} did not come within {self.timeout_s:g} s",
            why=f"Every rank must make this call, and rank {self.rank} waited for it{seen}",
            fix=f"Make the call on every rank; if it is only slow, set {env.TIMEOUT} to more seconds",
        )

    def last_seen(self, rank: int) -> Seen | None:
        """What a rank's watchdog last said it was doing; None if it never did.

        Raises:
            RankError: the store is gone.
        """
        key = f"beat/{rank}"
        if not self.call(self.store.check, [key]):
            return None
        return Seen.read(self.call(self.store.get, key).decode())


def second_connection(store: Store) -> Store:
    """The same store over a connection of its own, for use from another thread.

    Raises:
        RuntimeError: the store is gone.
    """
    clone = getattr(store, "clone", None)
    if clone is None:  # a store of the user's own: requests then share one connection, and are short
        return store
    twin: Store = clone()
    twin.set_timeout(timedelta(seconds=10))
    return twin


def has_timed_out(error: RuntimeError) -> bool:
    """Whether a request to the store took too long, which says nothing about the store but that it is slow.

    c10d then leaves the connection as it was before: it can be used again. Only ``get`` and ``wait`` have a time-out;
    a request that fails because the connection was closed is a DistNetworkError, and so is the kernel's own "Connection
    timed out", after which there is no connection. A FileStore raises a plain RuntimeError.
    """
    text = str(error).lower()
    return type(error).__name__ != "DistNetworkError" and ("timeout" in text or "timed out" in text)


def _different(what: str, first: Any, other: Any, rank: int) -> RankError:
    where = ""
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if keys:
            where = "".join(f"[{key!r}]" for key in keys[:1])
            first, other = first.get(keys[0]), other.get(keys[0])
    return RankError(
        f"{what}{where} differs between ranks: rank 0 has {_short(first)}, rank {rank} has {_short(other)}",
        why="Ranks that go on with different values compute different things, or wait for one another for ever",
        fix="Give every rank the same",
    )


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:_SHOWN]
