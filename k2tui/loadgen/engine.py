"""Sends the requests and stamps the tokens: raw sockets, epoll, kernel stamps, one thread. Knows no metric and no store.

Laws:
- every connection that the plan needs is open before the clock starts;
- the schedule is absolute: a late request never moves later ones;
- a token's time is the kernel's receive stamp where there is one, never the moment this loop got to it;
- reading goes before understanding: bytes that need the full parser wait (`Exchange.later`) while other sockets are ready, so
  that the first tokens of a thousand streams are not read two by two;
- nothing is dropped: a silent stream ends as `idle_timeout`, a broken one as `reset` or `truncated`.
"""

from __future__ import annotations

import gc
import heapq
import os
import resource
import select
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k2tui.errors import K2Error, NotReadyError
from k2tui.loadgen.clock import (
    MAX_DRIFT_NS,
    ask_kernel_stamps,
    cpu_steal,
    have_kernel_stamps,
    realtime_offset_ns,
)
from k2tui.loadgen.stream import Exchange, Plain, take_plain

now_ns = time.perf_counter_ns
_READ = 1 << 16
# Edge-triggered: the kernel need not look at every ready socket a second time. A read shorter than the buffer has emptied
# the socket; a FIN that came with the data shows as EPOLLRDHUP.
_WATCH = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_BUSY_TICK_NS = 50_000_000
NAP_STREAMS = 32
NAP_GAP_NS = 4_000_000
_STALE_NS = (
    1_000_000_000  # a kept connection idle for longer may have been closed by the server: one quiet retry
)


@dataclass(slots=True)
class Work:
    """One request to send. payload: the whole HTTP request, or a function that makes it.

    due_ns: offset from the run's start; -1 = as soon as a slot is free. follow(exchange): the session's next request, or
    None at its end; it is sent after `Work.due_ns` more ns (think time).
    """

    index: int
    payload: bytes | Callable[[], bytes]
    asked: int
    due_ns: int = -1
    ignore_eos: bool = True
    follow: Callable[[Exchange], Work | None] | None = None
    session: int = -1
    turn: int = 0


@dataclass(slots=True)
class Facts:
    """What the engine knows of its own run. Times in ns of perf_counter, lags in ns."""

    engine: str = "epoll"
    stamps: str = "kernel"
    t0: int = 0
    t1: int = 0
    cpu_s: float = 0.0
    lags: array[int] = field(
        default_factory=lambda: array("q")
    )  # newest read of each wake-up: arrival -> handled
    reads: int = 0
    unstamped: int = 0
    steal: float | None = None
    drift_ns: int = 0
    retried: int = 0
    peak_in_flight: int = 0
    rss_peak_b: int = 0
    late_ns: array[int] = field(
        default_factory=lambda: array("q")
    )  # open loop: sent - due, when a slot was free

    @property
    def cpu_fraction(self) -> float:
        return self.cpu_s / max((self.t1 - self.t0) / 1e9, 1e-9)


class _Conn:
    __slots__ = ("connecting", "exchange", "fd", "out", "quick", "read", "retry", "sock", "used_ns", "work")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.read = sock.recvmsg
        self.fd = sock.fileno()
        self.exchange: Exchange | None = None
        self.work: Work | None = None
        self.out: memoryview | None = None  # request bytes not sent yet
        self.connecting = False
        self.quick = False  # nothing waits, and its next read may be a plain token event
        self.used_ns = 0  # when the last exchange on it ended; 0 = fresh
        self.retry = False


class EpollEngine:
    """Closed and open loop on one thread. Use: open(n), run(...) any number of times, close()."""

    name = "epoll"

    def __init__(
        self, host: str, port: int, api: str, *, idle_timeout_s: float = 120.0, keep_text: bool = False
    ) -> None:
        self.host, self.port, self.api = host, port, api
        self.idle_timeout_ns = int(idle_timeout_s * 1e9)
        self.keep_text = keep_text
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as err:
            raise NotReadyError(f"cannot resolve {host!r}: {err.strerror or err}", "check the URL") from None
        # "localhost" may be ::1 and 127.0.0.1 while the server listens on one of them: the first that answers stays
        self._places = [(info[0], info[4]) for info in infos]
        self._ep = select.epoll()
        self._conns: dict[int, _Conn] = {}
        self._free: list[_Conn] = []
        self._kernel = have_kernel_stamps()

    # connections

    def open(self, n: int) -> bool:
        """Have at least n idle connections; True if some were made. Raises NotReadyError when the server refuses the first."""
        allow_files(n + 64)
        if len(self._free) >= n:
            return False
        while len(self._free) < n:
            try:
                sock = self._first_that_answers()
            except OSError as err:
                raise NotReadyError(
                    f"{self.host}:{self.port} refused connection {len(self._free) + 1} of {n}: {err.strerror or err}",
                    "is the server up? its log says how many connections it takes",
                ) from None
            self._free.append(self._adopt(sock))
        return True

    def _first_that_answers(self) -> socket.socket:
        """A connected socket; raises the last OSError when no address answers."""
        problem: OSError | None = None
        for place in self._places:
            sock = socket.socket(place[0], socket.SOCK_STREAM)
            sock.settimeout(10)
            try:
                sock.connect(place[1])
            except OSError as err:
                sock.close()
                problem = err
                continue
            self._places = [place]
            return sock
        raise problem or OSError("no address")

    def _adopt(self, sock: socket.socket) -> _Conn:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kernel and not ask_kernel_stamps(sock):
            self._kernel = False
        conn = _Conn(sock)
        self._conns[conn.fd] = conn
        self._ep.register(conn.fd, _WATCH)
        return conn

    def _connect(self) -> _Conn:
        """A connection in the making: the loop sends once it stands."""
        family, address = self._places[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kernel:
            ask_kernel_stamps(sock)
        conn = _Conn(sock)
        conn.connecting = True
        try:
            sock.connect(address)
        except BlockingIOError:
            pass
        self._conns[conn.fd] = conn
        self._ep.register(conn.fd, _WATCH | select.EPOLLOUT)
        return conn

    def _drop(self, conn: _Conn) -> None:
        self._conns.pop(conn.fd, None)
        try:
            self._ep.unregister(conn.fd)
        except (OSError, ValueError):
            pass
        conn.sock.close()

    def close(self) -> None:
        for conn in list(self._conns.values()):
            self._drop(conn)
        self._free.clear()
        self._ep.close()

    # the run

    def run(
        self,
        works: Sequence[Work],
        *,
        limit: int | None,
        on_done: Callable[[Exchange], None],
        on_idle: Callable[[int], bool] | None = None,
        stop_after_s: float | None = None,
        started: Callable[[int], None] | None = None,
    ) -> Facts:
        """Send every work and wait for every answer.

        limit: most requests in flight (closed loop: the concurrency; open loop: the cap, None = none). on_done gets each
        finished exchange at once; on_idle(now) is called about once a second between wake-ups,
        and again after 50 ms when it returns True (there is more to do). stop_after_s: no new
        request after that long; those in flight are waited for.
        """
        facts = Facts(engine=self.name, stamps="kernel" if self._kernel else "user")
        want = min(len(works), limit if limit is not None else min(len(works), 256))
        if self.open(want):
            time.sleep(
                min(0.02 + want * 1e-4, 0.3)
            )  # the server accepts them one by one: that is no part of a TTFT
        offset = realtime_offset_ns() if self._kernel else 0
        ready: deque[Work] = deque()
        timed: list[tuple[int, int, Work]] = []
        for w in works:
            if w.due_ns < 0:
                ready.append(w)
            else:
                timed.append((w.due_ns, w.index, w))
        heapq.heapify(timed)
        timer = _Timer(self._ep) if timed else None
        most = limit if limit is not None else 1 << 30
        in_flight = 0
        steal0 = cpu_steal()
        gc.collect()
        gc.freeze()
        gc.disable()
        reads = 0
        conns, poll = self._conns, self._ep.poll
        plain, tick_ns = select.EPOLLIN, 1_000_000_000
        control = socket.CMSG_SPACE(48) if self._kernel else 0
        lags = facts.lags
        backlog: deque[_Conn] = deque()  # streams with bytes in `later`
        # reads of one wake-up that look like plain token events written in one `way`: understood together
        way: Plain | None = None
        tail = b""
        held: list[_Conn] = []
        datas: list[bytes] = []
        marks: list[bytes] = []  # the kernel's control data, one stamp each
        nap = 0.0
        cpu0 = time.process_time()
        t0 = facts.t0 = now_ns()
        if started is not None:
            started(t0)
        stop_at = t0 + int(stop_after_s * 1e9) if stop_after_s is not None else None
        next_tick = t0 + tick_ns // 4
        timed_t0 = t0
        try:
            while ready or timed or in_flight:
                now = now_ns()
                if stop_at is not None and now >= stop_at:
                    ready.clear()
                    timed.clear()
                    if not in_flight:
                        break
                while timed and timed_t0 + timed[0][0] <= now:
                    ready.append(heapq.heappop(timed)[2])
                while ready and in_flight < most:
                    work = ready.popleft()
                    in_flight += 1
                    if in_flight > facts.peak_in_flight:
                        facts.peak_in_flight = in_flight
                    self._start(work, timed_t0, facts)
                timeout = 1.0
                if timed and timer is not None:
                    if timer.fd >= 0:
                        timer.arm(timed_t0 + timed[0][0])
                    else:
                        timeout = max((timed_t0 + timed[0][0] - now) / 1e9, 0.0)
                if stop_at is not None:
                    timeout = min(timeout, max((stop_at - now) / 1e9, 0.001))
                events = poll(0 if backlog else timeout)
                stamp = 0
                for fd, mask in events:
                    conn = conns.get(fd)
                    if conn is None:
                        if timer is not None and fd == timer.fd:
                            timer.clear()
                        continue
                    if (
                        mask != plain
                        and (conn.connecting or conn.out is not None)
                        and self._writable(conn, mask, facts)
                    ):
                        done = self._finished(conn, facts)
                        in_flight -= self._after(done, on_done, ready, timed, timed_t0)
                        continue
                    broken: OSError | None = None
                    try:
                        data, ancillary, _, _ = conn.read(_READ, control)
                    except BlockingIOError:
                        continue
                    except OSError as err:
                        data, ancillary, broken = b"", (), err
                    reads += 1
                    if conn.quick and mask == plain and ancillary and data.endswith(tail):
                        held.append(conn)
                        datas.append(data)
                        marks.append(ancillary[0][2])
                        continue
                    ex = conn.exchange
                    n = len(data)
                    if ancillary:
                        stamp = _stamps([ancillary[0][2]], offset)[0]
                    else:
                        stamp = now_ns()
                        if n and control:
                            facts.unstamped += 1
                    if n:
                        if ex is None:
                            self._drop(conn)  # bytes nobody asked for
                            self._forget(conn)
                            continue
                        if mask == plain and n < _READ:
                            conn.quick = False
                            if not ex.later:
                                backlog.append(conn)
                            ex.later.append((data, stamp))
                            continue
                        if not ex.catch_up() and not ex.receive(data, stamp):
                            # a FIN or more data may be behind these bytes, and the edge will not come again
                            try:
                                n = self._rest(conn, ex, control, offset)
                            except OSError as err:
                                n, broken = 0, err
                            if n < 0:
                                conn.quick = ex.plain is not None and ex.plain is way
                                continue
                    if broken is not None and ex is not None and not ex.catch_up():
                        stale = self._stale(conn, ex)
                        if stale is not None:
                            self._again(conn, stale, timed_t0, facts)
                            continue
                        ex.fail("reset", broken.strerror or str(broken))
                    if n == 0:
                        if ex is None:
                            self._drop(conn)  # the server closed an idle connection
                            self._forget(conn)
                            continue
                        if not ex.done and not ex.catch_up():
                            stale = self._stale(conn, ex)
                            if stale is not None:
                                self._again(conn, stale, timed_t0, facts)
                                continue
                            ex.closed(now_ns())
                    assert ex is not None
                    ex.t_done = stamp if n else now_ns()
                    done = self._finished(conn, facts)
                    in_flight -= self._after(done, on_done, ready, timed, timed_t0)
                if held:
                    stamps = _stamps(marks, offset)
                    stamp = stamps[-1]
                    exchanges = [ex for conn in held if (ex := conn.exchange) is not None]
                    if (
                        way is None
                        or max(map(len, datas)) >= _READ
                        or not take_plain(way, exchanges, datas, stamps)
                    ):
                        for conn, ex, data, at in zip(held, exchanges, datas, stamps, strict=True):
                            whole = ex.receive(data, at)
                            if not whole and len(data) >= _READ:
                                try:
                                    whole = self._rest(conn, ex, control, offset) == 1
                                except OSError:
                                    whole = False  # what closed it shows as an event of its own
                            if whole:
                                ex.t_done = at
                                done = self._finished(conn, facts)
                                in_flight -= self._after(done, on_done, ready, timed, timed_t0)
                            else:
                                conn.quick = ex.plain is way
                    held.clear()
                    datas.clear()
                    marks.clear()
                for _ in range(min(len(backlog), 1 if events else 8)):
                    conn = backlog.popleft()
                    ex = conn.exchange
                    if ex is None:
                        continue
                    if ex.catch_up():
                        done = self._finished(conn, facts)
                        in_flight -= self._after(done, on_done, ready, timed, timed_t0)
                        continue
                    if way is None and ex.plain is not None:
                        way, tail = ex.plain, ex.plain.tail
                    conn.quick = ex.plain is not None and ex.plain is way
                now = now_ns()
                if stamp:
                    lags.append(now - stamp)
                if nap and not backlog and not timed and len(events) < in_flight:
                    # the stamps are the kernel's: a token may lie a moment, and one wake-up then serves many streams
                    time.sleep(nap)
                    now = now_ns()
                if now >= next_tick:
                    next_tick = now + tick_ns
                    nap = self._nap(in_flight)
                    for conn in list(conns.values()):
                        ex = conn.exchange
                        if ex is not None and now - self._last_sign(ex) > self.idle_timeout_ns:
                            ex.fail("idle_timeout", f"nothing for {self.idle_timeout_ns / 1e9:g} s")
                            ex.t_done = now
                            done = self._finished(conn, facts)
                            in_flight -= self._after(done, on_done, ready, timed, timed_t0)
                    if on_idle is not None and on_idle(now):
                        next_tick = now + _BUSY_TICK_NS
            facts.reads = reads
            facts.t1 = now_ns()
            facts.cpu_s = time.process_time() - cpu0
        finally:
            gc.enable()
            gc.unfreeze()
            if timer is not None:
                timer.close()
            # what is still in flight (an interrupt) goes back to the caller as broken
            for conn in list(conns.values()):
                if conn.exchange is not None:
                    ex = conn.exchange
                    if not ex.catch_up():
                        ex.fail("interrupted", "the run was stopped")
                    conn.exchange = None
                    self._drop(conn)
                    on_done(ex)
        steal1 = cpu_steal()
        if steal0 and steal1 and steal1[1] > steal0[1]:
            facts.steal = (steal1[0] - steal0[0]) / (steal1[1] - steal0[1])
        if self._kernel:
            facts.drift_ns = abs(realtime_offset_ns() - offset)
            if facts.drift_ns > MAX_DRIFT_NS:
                facts.stamps = "kernel, clock stepped"
        facts.rss_peak_b = peak_rss_b()
        return facts

    def _rest(self, conn: _Conn, ex: Exchange, control: int, offset: int) -> int:
        """Read on until the socket is empty (-1), the answer is whole (1) or the server has closed (0)."""
        while True:
            try:
                data, ancillary, _, _ = conn.read(_READ, control)
            except BlockingIOError:
                return -1
            if not data:
                return 0
            if ex.receive(data, _stamps([ancillary[0][2]], offset)[0] if ancillary else now_ns()):
                return 1

    def _nap(self, in_flight: int) -> float:
        """Seconds that reading may wait after each wake-up: an eighth of the gap between a stream's tokens, at most 1 ms.

        0 without kernel stamps, with few streams, and where tokens come so fast that two of one stream could meet.
        """
        if not self._kernel or in_flight < NAP_STREAMS:
            return 0.0
        gaps: list[int] = []
        for conn in self._conns.values():
            ex = conn.exchange
            if ex is not None and len(ex.stamps) >= 4:
                if ex.coalesced * 100 > len(ex.stamps):
                    return 0.0
                gaps.append((ex.stamps[-1] - ex.stamps[0]) // (len(ex.stamps) - 1))
                if len(gaps) == 64:
                    break
        if not gaps or min(gaps) < NAP_GAP_NS:
            return 0.0
        return min(min(gaps) / 8e9, 0.001)

    def _after(
        self,
        ex: Exchange,
        on_done: Callable[[Exchange], None],
        ready: deque[Work],
        timed: list[tuple[int, int, Work]],
        t0: int,
    ) -> int:
        """Hand the exchange on; returns the slots that it frees (0 when its session goes on)."""
        follow = self._follow
        self._follow = None
        on_done(ex)
        if follow is None or ex.error:
            return 1
        work = follow(ex)
        if work is None:
            return 1
        if work.due_ns > 0:
            heapq.heappush(timed, (now_ns() - t0 + work.due_ns, work.index, work))
        else:
            ready.appendleft(work)
        return 1

    _follow: Callable[[Exchange], Work | None] | None = None

    def _start(self, work: Work, t0: int, facts: Facts) -> None:
        ex = new_exchange(work, self.api)
        now = now_ns()
        ex.t_sched = t0 + work.due_ns if work.due_ns >= 0 and work.turn == 0 else now
        if work.due_ns >= 0 and work.turn == 0:
            facts.late_ns.append(now - ex.t_sched)
        conn = self._free.pop() if self._free else self._connect()
        self._send(conn, work, ex)

    def _send(self, conn: _Conn, work: Work, ex: Exchange) -> None:
        conn.exchange, conn.work, conn.quick = ex, work, False
        payload = work.payload if isinstance(work.payload, bytes) else work.payload()
        if conn.connecting:
            conn.out = memoryview(payload)
            ex.t_send = now_ns()
            return
        try:
            sent = conn.sock.send(payload)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(payload)  # the read that follows tells what happened
        ex.t_send = now_ns()
        if sent < len(payload):
            conn.out = memoryview(payload)[sent:]
            self._ep.modify(conn.fd, _WATCH | select.EPOLLOUT)

    def _writable(self, conn: _Conn, mask: int, facts: Facts) -> bool:
        """Go on sending. True when the exchange failed."""
        ex = conn.exchange
        if conn.connecting:
            problem = conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                if ex is not None:
                    ex.fail("connect", os.strerror(problem))
                    ex.t_done = now_ns()
                    return True
                return False
            conn.connecting = False
        if conn.out is not None:
            try:
                sent = conn.sock.send(conn.out)
            except BlockingIOError:
                return False
            except OSError as err:
                if ex is not None:
                    ex.fail("reset", err.strerror or str(err))
                    ex.t_done = now_ns()
                    return True
                return False
            if ex is not None:
                ex.t_send = now_ns()
            conn.out = conn.out[sent:] if sent < len(conn.out) else None
        if conn.out is None:
            self._ep.modify(conn.fd, _WATCH)
        return False

    def _finished(self, conn: _Conn, facts: Facts) -> Exchange:
        """Take the finished exchange off its connection; keep the connection if it can be used again."""
        ex, work = conn.exchange, conn.work
        assert ex is not None
        conn.exchange = conn.work = None
        self._follow = work.follow if work is not None else None
        broken = (
            ex.error in ("reset", "truncated", "idle_timeout", "protocol", "connect") or not ex.answer.done
        )
        if broken or not ex.answer.keep_alive or conn.out is not None:
            self._drop(conn)
        else:
            conn.used_ns = now_ns()
            self._free.append(conn)
        return ex

    def _stale(self, conn: _Conn, ex: Exchange) -> Work | None:
        """The work to send again when a kept connection turned out closed before any byte of the answer."""
        if conn.used_ns and not conn.retry and ex.answer.status == 0 and ex.t_send - conn.used_ns > _STALE_NS:
            return conn.work
        return None

    def _again(self, conn: _Conn, work: Work, t0: int, facts: Facts) -> None:
        old = conn.exchange
        assert old is not None
        self._drop(conn)
        facts.retried += 1
        fresh = self._connect()
        fresh.retry = True
        ex = new_exchange(work, self.api)
        ex.t_sched = old.t_sched
        self._send(fresh, work, ex)

    def _forget(self, conn: _Conn) -> None:
        if conn in self._free:
            self._free.remove(conn)

    @staticmethod
    def _last_sign(ex: Exchange) -> int:
        return max(ex.t_send, ex.stamps[-1] if ex.stamps else 0, ex.later[-1][1] if ex.later else 0)


def new_exchange(work: Work, api: str) -> Exchange:
    return Exchange(
        work.index,
        api,
        work.asked,
        ignore_eos=work.ignore_eos,
        keep_text=work.follow is not None,
        session=work.session,
        turn=work.turn,
    )


def _stamps(marks: Sequence[bytes], offset: int) -> list[int]:
    """Receive times in ns of perf_counter. A mark is the kernel's three timespecs, of which the first is the software stamp."""
    times = array("q", b"".join(marks))
    seconds = times[0::6]
    base = seconds[0] * 1_000_000_000 - offset
    if seconds.count(seconds[0]) == len(seconds):
        return [base + ns for ns in times[1::6]]
    return [s * 1_000_000_000 + ns - offset for s, ns in zip(seconds, times[1::6], strict=True)]


class _Timer:
    """Wakes epoll at an absolute monotonic time: epoll's own time-out is rounded up to whole milliseconds."""

    def __init__(self, ep: select.epoll) -> None:
        self.fd = -1
        self._ep = ep
        self._armed = 0
        try:
            import ctypes

            self._libc = ctypes.CDLL(None, use_errno=True)
            self.fd = self._libc.timerfd_create(1, 0o4000 | 0o2000000)  # CLOCK_MONOTONIC, NONBLOCK | CLOEXEC
            self._spec = (ctypes.c_long * 4)()
        except (ImportError, OSError, AttributeError):
            self.fd = -1
        if self.fd >= 0:
            ep.register(self.fd, select.EPOLLIN)

    def arm(self, at_ns: int) -> None:
        if self.fd < 0 or at_ns == self._armed:
            return
        self._armed = at_ns
        self._spec[2], self._spec[3] = divmod(at_ns, 1_000_000_000)
        self._libc.timerfd_settime(self.fd, 1, self._spec, None)

    def clear(self) -> None:
        self._armed = 0
        try:
            os.read(self.fd, 8)
        except OSError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            self._ep.unregister(self.fd)
            os.close(self.fd)
            self.fd = -1


def allow_files(n: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= n:
        return
    if hard != resource.RLIM_INFINITY and hard < n:
        raise K2Error(
            f"{n} connections need {n} open files, this process may have {hard}",
            f"raise the limit (ulimit -n {n}) or ask for a lower concurrency",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))


def peak_rss_b() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
