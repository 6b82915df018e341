"""What a rank knows of the others, from the log of events. Plain bookkeeping: no store, no thread, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from polyscale.control.events import Event


class Peers:
    """The other ranks.

    Attributes:
        here: rank -> event of each that watches and is watched.
        left: rank -> event of each that has ended without an exception.
        failures: failures of others, in the order of the log.
        stuck: that all ranks wait for one another, if rank 0 has found that.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.here: dict[int, Event] = {}
        self.left: dict[int, Event] = {}
        self.failures: list[Event] = []
        self.stuck: Event | None = None

    def take(self, events: Iterable[Event]) -> None:
        """Take new events of the log."""
        for event in events:
            if event.rank == self.rank:
                continue
            if event.kind == "here":
                self.here[event.rank] = event
                self.left.pop(event.rank, None)
            elif event.kind == "left":
                self.here.pop(event.rank, None)
                self.left[event.rank] = event
            elif event.kind == "stuck":
                self.stuck = event
            elif event not in self.failures:
                self.failures.append(event)
                if event.kind != "failed":
                    self.here.pop(event.rank, None)

    def knows(self, rank: int) -> bool:
        """Whether anything was ever heard of ``rank``."""
        return rank in self.here or rank in self.left or any(event.rank == rank for event in self.failures)

    def pending(self, own_failures: int) -> list[Event]:
        """Failures that end this rank, which has failed ``own_failures`` times itself; causes before consequences."""
        fatal = [event for event in self.failures if event.kind != "failed" or event.number > own_failures]
        return sorted(fatal, key=lambda event: event.secondary)

    def causes(self, own_failures: int) -> list[Event]:
        """Failures that may be behind the latest of this rank's ``own_failures``."""
        return [event for event in self._recent(own_failures) if not event.secondary]

    def consequences(self, own_failures: int) -> dict[int, Event]:
        """The latest failure by rank of those that, like this one, have only seen a collective fail."""
        return {event.rank: event for event in self._recent(own_failures) if event.secondary}

    def _recent(self, own_failures: int) -> list[Event]:
        return [event for event in self.failures if event.kind != "failed" or event.number >= own_failures]

    def departures(self) -> list[Event]:
        """Ranks that have left of their own accord."""
        return [event for event in self.left.values() if not event.code]

    def on(self, place: str) -> list[Event]:
        """Watched ranks whose processes can be seen from ``place``."""
        return [event for event in self.here.values() if event.place == place]

    def next_host(self, place: str, rank: int) -> list[Event]:
        """The ranks of the host that ``rank`` of ``place`` has to listen to; empty unless it is first on its own.

        Hosts form a ring in the order of their first ranks.
        """
        by_place: dict[str, list[Event]] = {}
        for event in self.here.values():
            by_place.setdefault(event.place, []).append(event)
        if any(event.rank < rank for event in by_place.pop(place, [])):
            return []
        groups = sorted((sorted(group, key=lambda e: e.rank) for group in by_place.values()), key=lambda g: g[0].rank)
        behind = [group for group in groups if group[0].rank > rank]
        return (behind or groups or [[]])[0]
