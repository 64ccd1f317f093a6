"""The same engine on asyncio: other systems, TLS and proxies. Its stamps are taken in user space, and its rows say so."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import heapq
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from k2tui.errors import NotReadyError, UsageError
from k2tui.loadgen.clock import cpu_steal
from k2tui.loadgen.engine import Facts, Work, allow_files, new_exchange, now_ns, peak_rss_b
from k2tui.loadgen.stream import Exchange

_STALE_NS = 1_000_000_000


class _Link(asyncio.Protocol):
    """One kept connection; hands bytes to the exchange in flight."""

    def __init__(self, engine: AsyncioEngine) -> None:
        self.engine = engine
        self.transport: Any = None
        self.exchange: Exchange | None = None
        self.work: Work | None = None
        self.used_ns = 0
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        stamp = now_ns()
        ex = self.exchange
        if ex is None:
            self.transport.abort()  # bytes nobody asked for
            return
        self.engine.last_stamp = stamp
        self.engine.facts.reads += 1
        if ex.receive(data, stamp):
            ex.t_done = stamp
            self.engine.finished(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        ex = self.exchange
        if ex is None:
            self.engine.forget(self)
            return
        work = self.work
        if (
            work is not None
            and self.used_ns
            and ex.answer.status == 0
            and ex.t_send - self.used_ns > _STALE_NS
        ):
            self.exchange = None
            self.engine.again(work, ex)
            return
        ex.t_done = now_ns()
        if exc is not None:
            ex.fail("reset", str(exc))
        else:
            ex.closed(ex.t_done)
        self.engine.finished(self)


class AsyncioEngine:
    """Same orders as EpollEngine: open(n), run(...), close()."""

    name = "asyncio"

    def __init__(
        self,
        host: str,
        port: int,
        api: str,
        *,
        idle_timeout_s: float = 120.0,
        tls: bool = False,
        proxy: str = "",
        insecure: bool = False,
        ca_file: str = "",
    ) -> None:
        self.host, self.port, self.api = host, port, api
        self.idle_timeout_ns = int(idle_timeout_s * 1e9)
        self.proxy = proxy
        self.tls = _tls_context(insecure, ca_file) if tls else None
        self.facts = Facts(engine=self.name, stamps="user")
        self.last_stamp = 0
        self._loop = asyncio.new_event_loop()
        self._free: list[_Link] = []
        self._links: set[_Link] = set()
        self._ready: deque[Work] = deque()
        self._timed: list[tuple[int, int, Work]] = []
        self._in_flight = 0
        self._wake: asyncio.Event | None = None
        self._on_done: Callable[[Exchange], None] = lambda ex: None
        self._tasks: set[asyncio.Task[None]] = set()

    # connections

    def open(self, n: int) -> bool:
        if len(self._free) >= n:
            return False
        self._loop.run_until_complete(self._open(n))
        return True

    async def _open(self, n: int) -> None:
        allow_files(n + 64)
        while len(self._free) < n:
            try:
                self._free.append(await self._connect())
            except (OSError, ssl.SSLError) as err:
                raise NotReadyError(
                    f"{self.host}:{self.port} refused connection {len(self._free) + 1} of {n}: {err}",
                    "is the server up? for a private certificate give --ca-file or --insecure",
                ) from None

    async def _connect(self) -> _Link:
        loop = asyncio.get_running_loop()
        if not self.proxy:
            _, link = await loop.create_connection(
                lambda: _Link(self),
                self.host,
                self.port,
                ssl=self.tls,
                server_hostname=self.host if self.tls else None,
            )
        else:
            sock = await self._tunnel(loop)
            _, link = await loop.create_connection(
                lambda: _Link(self), sock=sock, ssl=self.tls, server_hostname=self.host if self.tls else None
            )
        self._links.add(link)
        return link

    async def _tunnel(self, loop: asyncio.AbstractEventLoop) -> Any:
        """A socket through the proxy's CONNECT."""
        import socket

        parts = urlsplit(self.proxy)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"--proxy {self.proxy!r}: only http://HOST:PORT proxies are known")
        sock = socket.socket(socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        infos = await loop.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_STREAM, family=sock.family
        )
        await loop.sock_connect(sock, infos[0][4])
        head = f"CONNECT {self.host}:{self.port} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            head += "Proxy-Authorization: Basic " + base64.b64encode(pair.encode()).decode() + "\r\n"
        await loop.sock_sendall(sock, head.encode() + b"\r\n")
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = await loop.sock_recv(sock, 4096)
            if not part or len(answer) > 65536:
                sock.close()
                raise OSError("the proxy closed the connection")
            answer += part
        status = answer.split(b" ", 2)[1:2]
        if status != [b"200"]:
            sock.close()
            raise OSError(f"the proxy answers {answer.splitlines()[0].decode('latin-1')!r}")
        return sock

    def forget(self, link: _Link) -> None:
        self._links.discard(link)
        if link in self._free:
            self._free.remove(link)

    def close(self) -> None:
        async def down() -> None:
            for link in list(self._links):
                link.exchange = None
                link.transport.abort()
            await asyncio.sleep(0)

        if not self._loop.is_closed():
            self._loop.run_until_complete(down())
            self._loop.close()

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
        self.facts = Facts(engine=self.name, stamps="user")
        self._on_done = on_done
        want = min(len(works), limit if limit is not None else min(len(works), 256))
        if self.open(want):
            time.sleep(min(0.02 + want * 1e-4, 0.3))  # as in engine.py
        self._ready = deque(w for w in works if w.due_ns < 0)
        self._timed = [(w.due_ns, w.index, w) for w in works if w.due_ns >= 0]
        heapq.heapify(self._timed)
        self._in_flight = 0
        steal0 = cpu_steal()
        gc.collect()
        gc.freeze()
        gc.disable()
        cpu0 = time.process_time()
        try:
            self._loop.run_until_complete(self._drive(limit, on_idle, stop_after_s, started))
        finally:
            gc.enable()
            gc.unfreeze()
            for link in list(self._links):
                ex = link.exchange
                if ex is not None:
                    link.exchange = None
                    link.transport.abort()
                    ex.fail("interrupted", "the run was stopped")
                    on_done(ex)
        facts = self.facts
        facts.t1 = now_ns()
        facts.cpu_s = time.process_time() - cpu0
        steal1 = cpu_steal()
        if steal0 and steal1 and steal1[1] > steal0[1]:
            facts.steal = (steal1[0] - steal0[0]) / (steal1[1] - steal0[1])
        facts.rss_peak_b = peak_rss_b()
        return facts

    async def _drive(
        self,
        limit: int | None,
        on_idle: Callable[[int], bool] | None,
        stop_after_s: float | None,
        started: Callable[[int], None] | None,
    ) -> None:
        most = limit if limit is not None else 1 << 30
        self._wake = asyncio.Event()
        t0 = self.facts.t0 = now_ns()
        if started is not None:
            started(t0)
        next_tick = t0 + 1_000_000_000
        while self._ready or self._timed or self._in_flight:
            self._wake.clear()
            now = now_ns()
            if stop_after_s is not None and now - t0 >= stop_after_s * 1e9:
                self._ready.clear()
                self._timed.clear()
                if not self._in_flight:
                    break
            while self._timed and t0 + self._timed[0][0] <= now:
                self._ready.append(heapq.heappop(self._timed)[2])
            while self._ready and self._in_flight < most:
                self._start(self._ready.popleft(), t0)
            wait = max(next_tick - now, 0) / 1e9
            if self._timed and self._in_flight < most:
                wait = min(wait, max(t0 + self._timed[0][0] - now, 0) / 1e9)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)
            now = now_ns()
            if self.last_stamp:
                self.facts.lags.append(now - self.last_stamp)
                self.last_stamp = 0
            if now >= next_tick:
                next_tick = now + 1_000_000_000
                for link in list(self._links):
                    ex = link.exchange
                    if (
                        ex is not None
                        and now - max(ex.t_send, ex.stamps[-1] if ex.stamps else 0) > self.idle_timeout_ns
                    ):
                        ex.fail("idle_timeout", f"nothing for {self.idle_timeout_ns / 1e9:g} s")
                        ex.t_done = now
                        self.finished(link)
                if on_idle is not None and on_idle(now):
                    next_tick = now + 50_000_000

    def _start(self, work: Work, t0: int) -> None:
        ex = new_exchange(work, self.api)
        now = now_ns()
        ex.t_sched = t0 + work.due_ns if work.due_ns >= 0 and work.turn == 0 else now
        if work.due_ns >= 0 and work.turn == 0:
            self.facts.late_ns.append(now - ex.t_sched)
        self._in_flight += 1
        self.facts.peak_in_flight = max(self.facts.peak_in_flight, self._in_flight)
        while self._free:
            link = self._free.pop()
            if link.is_open:
                self._send(link, work, ex)
                return
        self._later(work, ex)

    def _later(self, work: Work, ex: Exchange) -> None:
        async def connect() -> None:
            ex.t_send = now_ns()
            try:
                link = await self._connect()
            except (OSError, ssl.SSLError) as err:
                ex.fail("connect", str(err))
                ex.t_done = now_ns()
                self._settle(ex, work)
                return
            self._send(link, work, ex)

        task = asyncio.get_running_loop().create_task(connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, link: _Link, work: Work, ex: Exchange) -> None:
        link.exchange, link.work = ex, work
        link.transport.write(work.payload if isinstance(work.payload, bytes) else work.payload())
        ex.t_send = now_ns()

    def again(self, work: Work, old: Exchange) -> None:
        """A kept connection turned out closed before any byte: once more on a fresh one."""
        ex = new_exchange(work, self.api)
        ex.t_sched = old.t_sched
        self.facts.retried += 1
        self._later(work, ex)

    def finished(self, link: _Link) -> None:
        ex, work = link.exchange, link.work
        assert ex is not None and work is not None
        link.exchange = link.work = None
        broken = ex.error in ("reset", "truncated", "idle_timeout", "protocol") or not ex.answer.done
        if broken or not ex.answer.keep_alive or not link.is_open:
            self.forget(link)
            link.transport.abort()
        else:
            link.used_ns = now_ns()
            self._free.append(link)
        self._settle(ex, work)

    def _settle(self, ex: Exchange, work: Work) -> None:
        self._in_flight -= 1
        self._on_done(ex)
        if work.follow is not None and not ex.error:
            follow = work.follow(ex)
            if follow is not None:
                if follow.due_ns > 0:
                    heapq.heappush(
                        self._timed, (now_ns() - self.facts.t0 + follow.due_ns, follow.index, follow)
                    )
                else:
                    self._ready.appendleft(follow)
        if self._wake is not None:
            self._wake.set()


def _tls_context(insecure: bool, ca_file: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as err:
        raise UsageError(f"--ca-file {ca_file}: {err}") from None
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
