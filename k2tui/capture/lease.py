"""Who works on which samples: ranges handed out with leases, so that a lost server loses nothing. Pure; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class LeaseTable:
    """Samples 0..n-1 of the data file that are still to be done.

    A sample is *waiting*, *leased* (to a worker, until a time), *sent* (answered, not yet seen on disk), *done* (on disk), or
    *failed* (max_tries used up). Only `done` and `failed` are final.
    """

    lease_s: float = 600.0
    max_tries: int = 4
    waiting: deque[int] = field(default_factory=deque[int])
    leased: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])
    sent: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])
    done: set[int] = field(default_factory=set[int])
    failed: dict[int, str] = field(default_factory=dict[int, str])
    tries: dict[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, wanted: Iterable[int], done: Iterable[int] = (), **kwargs: float | int) -> LeaseTable:
        there = set(done)
        table = cls(**kwargs)  # type: ignore[arg-type]
        table.done = there
        table.waiting.extend(i for i in wanted if i not in there)
        return table

    @property
    def left(self) -> int:
        return len(self.waiting) + len(self.leased) + len(self.sent)

    def take(self, worker: str, count: int, now: float) -> list[int]:
        """Up to `count` samples, in the data file's order, leased to that worker. A new lease is a new try."""
        out: list[int] = []
        while self.waiting and len(out) < count:
            index = self.waiting.popleft()
            if index in self.done:
                continue
            self.leased[index] = (worker, now + self.lease_s)
            self.tries[index] = self.tries.get(index, 0) + 1
            out.append(index)
        return out

    def answered(self, index: int, worker: str, now: float) -> None:
        """The server took the sample; it counts only when it is seen on disk."""
        if self.leased.pop(index, None) is not None and index not in self.done:
            self.sent[index] = (worker, now)

    def published(self, indices: Iterable[int]) -> int:
        """These are on disk. Returns how many are new. A late copy of a sample given to two workers counts once."""
        new = 0
        for index in indices:
            if index in self.done:
                continue
            self.done.add(index)
            self.leased.pop(index, None)
            self.sent.pop(index, None)
            self.failed.pop(index, None)
            new += 1
        return new

    def give_back(self, index: int, reason: str, *, counts: bool = True) -> None:
        """It did not work: wait for another try, or fail for good. counts=False: the server's fault, try again for ever."""
        known = self.leased.pop(index, None) or self.sent.pop(index, None)
        if known is None or index in self.done:
            return
        if not counts:
            self.tries[index] -= 1
        if self.tries[index] >= self.max_tries:
            self.failed[index] = reason
        else:
            self.waiting.append(index)

    def lose(self, worker: str, reason: str = "the server is gone") -> list[int]:
        """A worker is gone: everything that it had and that is not on disk waits again."""
        gone = [i for i, (who, _) in {**self.leased, **self.sent}.items() if who == worker]
        for index in gone:
            self.give_back(index, reason, counts=False)
        return gone

    def expire(self, now: float) -> list[int]:
        """Leases that ran out wait again."""
        late = [i for i, (_, until) in self.leased.items() if now > until]
        for index in late:
            self.give_back(index, f"no answer in {self.lease_s:.0f} s")
        return late

    def overdue(self, now: float, after_s: float) -> list[int]:
        """Answered more than after_s ago and still not on disk."""
        return [i for i, (_, since) in self.sent.items() if now - since > after_s]
