"""Whose turn it is among jobs that wait for the same names. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AGING_S = 600.0  # each ten minutes of waiting weigh as much as one step of priority: nobody starves


@dataclass(frozen=True, slots=True)
class Waiter:
    """since_s: seconds since boot when it began to wait."""

    job_id: str
    priority: int
    since_s: float
    names: tuple[str, ...]


def weight(waiter: Waiter, now_s: float) -> float:
    return waiter.priority + max(0.0, now_s - waiter.since_s) / AGING_S


def may_go(me: Waiter, others: Iterable[Waiter], now_s: float) -> Waiter | None:
    """None when nobody who wants one of my names is before me, else who is. Higher weight first, then longer waiting, then id."""
    mine = (-weight(me, now_s), me.since_s, me.job_id)
    ahead = [
        o for o in others if set(o.names) & set(me.names) and (-weight(o, now_s), o.since_s, o.job_id) < mine
    ]
    return min(ahead, key=lambda o: (-weight(o, now_s), o.since_s, o.job_id), default=None)
