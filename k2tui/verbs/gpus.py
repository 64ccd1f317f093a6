"""`k2tui gpus`: GPUs, their processes and their links, once or as a stream; also as JSON, for Prometheus, and from history."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import TYPE_CHECKING

from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:
    from k2tui.core.gpu import GpuProcess, GpuView
    from k2tui.core.host import HostSample

READS = ("",)  # goes on with a broken config
HELP = "GPUs, processes, links and history; --json, --watch, --prometheus"
DESCRIPTION = (
    "GPUs of this host as NVML tells them, with the processes that hold their memory. Exit code 5: no GPU."
)
EXIT_NO_GPU = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line a sample")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=1.0,
        metavar="S",
        help="go on, a sample every S seconds (default 1)",
    )
    parser.add_argument("--prometheus", action="store_true", help="print the Prometheus text format")
    parser.add_argument(
        "--port", type=int, metavar="N", help="with --prometheus: serve it on http://127.0.0.1:N/metrics"
    )
    parser.add_argument(
        "--host", action="store_true", help="the host's figures too (CPU, memory, page cache, disks, network)"
    )
    parser.add_argument(
        "--topology", action="store_true", help="how the GPUs are joined: NVLink, PCIe, peer access, NUMA"
    )
    parser.add_argument(
        "--free",
        type=int,
        metavar="N",
        help="print N idle, well-joined GPUs for CUDA_VISIBLE_DEVICES (exit 5: not so many)",
    )
    parser.add_argument(
        "--orphans", action="store_true", help="only processes that hold GPU memory after their server died"
    )
    parser.add_argument("--end", action="store_true", help="with --orphans: end them (asks first)")
    parser.add_argument("--yes", action="store_true", help="with --end: do not ask")
    parser.add_argument(
        "--since", metavar="SPAN", help="curves of the last SPAN (90s, 10m, 2h) from the history on disk"
    )
    parser.add_argument("--job", metavar="ID", help="curves of a job's own time span")
    parser.add_argument(
        "--record", action="store_true", help="with --watch: keep the samples in the history on disk"
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.topology:
        return _topology(args)
    if args.since or args.job:
        return _history(args)
    if args.free is not None:
        return _free(args)
    if args.orphans:
        return _orphans(args)
    if args.prometheus and args.port is not None:
        return _serve(args.port)
    if args.watch is not None:
        return _watch(args)
    view, host = _take(args.host)
    if args.prometheus:
        from k2tui.core.gpu_export import prometheus_text

        sys.stdout.write(prometheus_text(view, host))
    elif args.json:
        from k2tui.core.gpu_export import view_json

        print(json.dumps(view_json(view, host), ensure_ascii=False, indent=1))
    else:
        print(render(view, host))
    return EXIT_NO_GPU if not view.gpus else 0


def _check(args: argparse.Namespace) -> None:
    if args.watch is not None and not 0.1 <= args.watch <= 3600:
        raise UsageError(f"--watch {args.watch:g}: the interval must be 0.1 to 3600 seconds")
    if args.port is not None and not args.prometheus:
        raise UsageError("--port needs --prometheus")
    if args.port is not None and not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: a port is 1 to 65535")
    if (args.end or args.yes) and not args.orphans:
        raise UsageError("--end and --yes need --orphans")
    if args.free is not None and args.free < 1:
        raise UsageError(f"--free {args.free}: at least 1")
    if args.record and args.watch is None:
        raise UsageError("--record needs --watch")


def _take(with_host: bool) -> tuple[GpuView, HostSample | None]:
    from k2tui.sources.nvml import NvmlSampler

    sampler = NvmlSampler()
    try:
        view = sampler.take()
    finally:
        sampler.stop()
    if not with_host:
        return view, None
    from k2tui.sources.host import HostSampler

    host = HostSampler()
    host.take()
    time.sleep(0.2)  # rates and CPU shares need two readings
    return view, host.take(with_rates=True)


# -- text ----------------------------------------------------------------------------------------------------------------------


def render(view: GpuView, host: HostSample | None = None) -> str:
    """The whole view as text: a line a GPU, what is wrong, a line a process. At most 80 columns but for the last column."""
    from k2tui.core import gpu_text as t
    from k2tui.core.gpu import describe_health, memory_percent
    from k2tui.plain import mark, paint, use_unicode

    if not view.gpus:
        lines = [view.error or "no GPU"] + ([view.hint] if view.hint else [])
        return "\n".join(lines + ([_host_line(host)] if host else []))
    rows: list[list[str]] = []
    for gpu in view.gpus:
        if gpu.error:
            rows.append(
                [
                    str(gpu.index),
                    t.short_gpu_name(gpu.name),
                    "",
                    "",
                    "",
                    "",
                    "",
                    "",
                    "",
                    paint(gpu.error, "error"),
                ]
            )
            continue
        share = memory_percent(gpu)
        ranks = sorted(
            {p.rank or p.name for p in view.processes if p.gpu_index == gpu.index and (p.rank or p.name)}
        )
        names = ",".join(ranks)
        rows.append(
            [
                str(gpu.index),
                t.short_gpu_name(gpu.name),
                t.percent_text(gpu.gpu_utilization),
                t.memory_text(gpu) + ("u" if gpu.memory_kind == "unified" else ""),
                t.percent_text(share),
                t.power_text(gpu),
                t.temperature_text(gpu.temperature_c),
                t.NONE_TEXT if gpu.sm_clock_mhz is None else str(gpu.sm_clock_mhz),
                t.link_text(gpu),
                names,
            ]
        )
    versions = f"driver {view.driver_version}" + (f", CUDA {view.cuda_version}" if view.cuda_version else "")
    count = len(view.gpus)
    lines = [f"{count} GPU{'s' if count != 1 else ''}, {versions}"]
    header = ["GPU", "NAME", "UTIL", "MEMORY", "", "POWER", "TEMP", "MHz", "PCIe", "RANK"]
    lines.append(_painted_table(header, rows, right=(0, 2, 3, 4, 5, 6, 7)))
    for gpu in view.gpus:
        for slice_ in gpu.mig:
            lines.append(
                f"  GPU {gpu.index} MIG {slice_.gpu_instance}: {slice_.name}, {t.gib(slice_.memory_used_b)}/{t.gib(slice_.memory_total_b)}G"
            )
        for severity, text in describe_health(gpu):
            if text != gpu.error:
                lines.append(paint(f"{mark(severity)} GPU {gpu.index}: {text}", severity))
    lines.extend(paint(f"{mark('info')} {note}", "info") for note in view.notes)
    if view.processes:
        lines.append("")
        lines.append(_process_table(view.processes, view.taken_s))
    if host:
        lines.append("")
        lines.append(_host_line(host))
    text = "\n".join(lines)
    return text if use_unicode() else text.encode("ascii", "replace").decode()


def _painted_table(header: list[str], rows: list[list[str]], *, right: tuple[int, ...]) -> str:
    """Aligned columns whose last one may hold colour codes of ours."""
    widths = [max(len(row[c]) for row in [header, *rows]) for c in range(len(header) - 1)]
    out: list[str] = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(w) if c in right else cell.ljust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        out.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(out)


def _process_table(processes: tuple[GpuProcess, ...], now_s: float) -> str:
    from k2tui.core import gpu_text as t
    from k2tui.plain import table

    rows: list[list[str]] = []
    for p in sorted(processes, key=lambda p: (p.gpu_index, -(p.memory_used_b or 0))):
        name = p.command or p.name if p.is_visible else "(not visible in this PID namespace)"
        rows.append(
            [
                str(p.gpu_index),
                str(p.pid),
                p.user,
                t.NONE_TEXT if p.memory_used_b is None else t.gib(p.memory_used_b) + "G",
                t.percent_text(p.sm_utilization),
                t.NONE_TEXT if p.host_rss_b is None else t.gib(p.host_rss_b) + "G",
                t.age_text(None if p.started_s is None else now_s - p.started_s),
                p.rank,
                p.job_id,
                ("ORPHAN " if p.is_orphan else "") + name[:120],
            ]
        )
    header = ["GPU", "PID", "USER", "GPU-MEM", "SM", "HOST", "AGE", "RANK", "JOB", "COMMAND"]
    return table(header, rows, right=(0, 1, 3, 4, 5, 6))


def _host_line(host: HostSample) -> str:
    from k2tui.core import gpu_text as t

    parts = [
        f"CPU {t.percent_text(host.cpu_percent)} of {len(host.cpu_percent_per_core)} cores",
        f"memory {t.gib(host.memory_used_b)}/{t.gib(host.memory_total_b)}G",
        f"page cache {t.gib(host.page_cache_b)}G",
        f"disk read {t.rate_text(host.disk_read_b_s)} write {t.rate_text(host.disk_write_b_s)}",
        f"net in {t.rate_text(host.net_rx_b_s)} out {t.rate_text(host.net_tx_b_s)}",
        f"/dev/shm {t.gib(host.shm_used_b)}/{t.gib(host.shm_total_b)}G",
        f"files {host.fd_limit if host.fd_limit is not None else 'unlimited'}",
    ]
    return "host: " + ", ".join(parts)


# -- the stream ----------------------------------------------------------------------------------------------------------------


def _watch(args: argparse.Namespace) -> int:
    """Print each sample until Ctrl-C. A terminal is redrawn in place, anything else gets one block (or JSON line) a sample."""
    from k2tui.core.gpu_export import prometheus_text, view_json
    from k2tui.sources.gpuhistory import GpuHistory
    from k2tui.sources.host import HostSampler
    from k2tui.sources.nvml import NvmlSampler

    sampler = NvmlSampler(args.watch)
    host = HostSampler(args.watch) if args.host else None
    history = GpuHistory() if args.record else None
    is_terminal = sys.stdout.isatty() and not args.json and not args.prometheus
    view: GpuView | None = None
    try:
        while True:
            began = time.monotonic()
            view = sampler.take()
            figures = host.take() if host else None
            if history:
                history.push(view)
                if history.error:
                    print(history.error, file=sys.stderr)
            if args.json:
                text = json.dumps(view_json(view, figures), ensure_ascii=False)
            elif args.prometheus:
                text = prometheus_text(view, figures)
            else:
                text = render(view, figures)
            if is_terminal:
                # overwrite in place: home, each line cleared to its end, the rest of the screen cleared
                text = "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J"
            print(text, flush=True)
            time.sleep(max(0.0, args.watch - (time.monotonic() - began)))
    except KeyboardInterrupt:
        return 0 if view is None or view.gpus else EXIT_NO_GPU
    finally:
        sampler.stop()
        if history:
            history.close()


def _serve(port: int) -> int:
    """/metrics on loopback until Ctrl-C; the samples go on between the requests, so that rates are there."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from k2tui.core.gpu_export import prometheus_text
    from k2tui.sources.host import HostSampler
    from k2tui.sources.nvml import NvmlSampler

    sampler, host = NvmlSampler(), HostSampler()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = prometheus_text(sampler.latest(), host.latest()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as err:
        raise K2Error(f"port {port}: {err.strerror or err}", "take another --port")
    sampler.start()
    host.start()
    print(f"http://127.0.0.1:{port}/metrics", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
        sampler.stop()
        host.stop()
    return 0


# -- topology, history, orphans ------------------------------------------------------------------------------------------------


def _topology(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.topology import describe_topology, matrix_lines
    from k2tui.plain import mark
    from k2tui.sources.nvml_topology import read_topology

    topology = read_topology()
    if args.json:
        data = asdict(topology)
        for raw, pair in zip(data["pairs"], topology.pairs, strict=True):
            raw["label"] = pair.label
        data["remarks"] = [{"severity": s, "text": text} for s, text in describe_topology(topology)]
        print(json.dumps({"schema": 1, **data}, ensure_ascii=False, indent=1))
    elif topology.error:
        print(topology.error)
        if topology.hint:
            print(topology.hint)
    else:
        print("\n".join(matrix_lines(topology)))
        for severity, text in describe_topology(topology):
            print(f"{mark(severity)} {text}")
    return 0 if topology.gpus else EXIT_NO_GPU


def _free(args: argparse.Namespace) -> int:
    """The best joined among the GPUs that nobody uses."""
    from k2tui.core.gpu import free_gpus
    from k2tui.core.topology import choose_gpus
    from k2tui.sources.nvml_topology import read_topology

    view, _ = _take(False)
    if not view.gpus:
        raise K2Error(view.error or "no GPU", view.hint, exit_code=EXIT_NO_GPU)
    free = free_gpus(view)
    chosen = choose_gpus(read_topology(), args.free, free) if free else ()
    if args.json:
        print(json.dumps({"schema": 1, "gpus": list(chosen), "free": free}))
    elif chosen:
        print(",".join(map(str, chosen)))
    if not chosen:
        raise K2Error(
            f"{len(free)} of {len(view.gpus)} GPUs are free, {args.free} are wanted", exit_code=EXIT_NO_GPU
        )
    return 0


def parse_span(text: str) -> float:
    """ "90s", "10m", "2h", "1d" or plain seconds -> seconds. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--since {text!r} is not a span", "write 90s, 10m, 2h or 1d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _history(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core import gpu_text as t
    from k2tui.core.gpu_series import summarize
    from k2tui.plain import clock, table, use_unicode
    from k2tui.sources.gpuhistory import read_curves

    now = time.time()
    if args.job:
        from k2tui.jobs import folder

        job = folder.get(args.job)
        if job.started_s is None:
            raise K2Error(f"job {args.job} has not started yet: it has no time span")
        start, end = job.started_s, job.ended_s or now
    else:
        start, end = now - parse_span(args.since), now
    # whole seconds around the span, so that a job shorter than a second has a sample too
    curves = read_curves(float(int(start)), float(int(end) + 1))
    lines = summarize(curves)
    if args.json:
        data = {"schema": 1, **asdict(curves), "summary": [asdict(line) for line in lines]}
        print(json.dumps(data, ensure_ascii=False, indent=1))
        return 0
    print(f"{clock(start)} to {clock(end)}, {t.age_text(end - start)}")
    if not lines:
        print("no GPU samples in that time: the dashboard, or `k2tui gpus --watch --record`, writes them")
        return 0
    rows: list[list[str]] = []
    width, ascii_only = 40, not use_unicode()
    for line, gpu in zip(lines, curves.gpus, strict=True):
        shown = _shrink(gpu.gpu_utilization, width if ascii_only else width * 2)
        rows.append(
            [
                str(line.index),
                t.percent_text(line.gpu_utilization_mean),
                "" if line.memory_used_mb_max is None else f"{line.memory_used_mb_max / 1024:.1f}G",
                "" if line.power_usage_w_mean is None else f"{line.power_usage_w_mean:.0f}W",
                "" if line.energy_j is None else f"{line.energy_j / 3600:.1f}Wh",
                "" if line.temperature_c_max is None else f"{line.temperature_c_max:.0f}C",
                "" if line.throttled_share is None else f"{100 * line.throttled_share:.0f}%",
                f"{100 * line.coverage:.0f}%",
                t.curve(shown, 1, ascii_only=ascii_only)[0],
            ]
        )
    header = ["GPU", "UTIL", "MEM-MAX", "POWER", "ENERGY", "TEMP-MAX", "SLOWED", "SAMPLED", "UTIL OVER TIME"]
    print(table(header, rows, right=tuple(range(8))))
    return 0


def _shrink(values: tuple[float | None, ...], count: int) -> list[float | None]:
    """At most `count` means of neighbouring values."""
    if len(values) <= count:
        return list(values)
    out: list[float | None] = []
    for step in range(count):
        part = [
            v
            for v in values[step * len(values) // count : (step + 1) * len(values) // count]
            if v is not None
        ]
        out.append(sum(part) / len(part) if part else None)
    return out


def _orphans(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core import gpu_text as t
    from k2tui.core.gpu import find_orphans

    view, _ = _take(False)
    orphans = find_orphans(_with_jobs(view))
    if args.json and not args.end:
        print(
            json.dumps(
                {"schema": 1, "orphans": [asdict(p) for p in orphans], "error": view.error},
                ensure_ascii=False,
                indent=1,
            )
        )
        return 0
    if not orphans:
        print(view.error or "no process holds GPU memory after its server died")
        return 0
    for p in orphans:
        print(
            f"pid {p.pid}  {p.user}  GPU {p.gpu_index}  {t.gib(p.memory_used_b)}G  {p.name}: {p.orphan_reason}"
        )
    if not args.end:
        print("k2tui gpus --orphans --end ends them")
        return 0
    ours = [p for p in orphans if p.is_own and p.started_s is not None]
    if len(ours) < len(orphans):
        print(f"{len(orphans) - len(ours)} belong to other users and are left alone", file=sys.stderr)
    if not ours:
        return 1
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("ending processes needs a yes", "add --yes, or run it in a terminal")
        answer = input(f"End pid {', '.join(str(p.pid) for p in ours)}? Type yes: ")
        if answer.strip().lower() != "yes":
            print("nothing was ended")
            return 1
    from k2tui.sources.procs import end_processes

    results = end_processes([(p.pid, p.started_s) for p in ours if p.started_s is not None])
    if args.json:
        print(json.dumps({"schema": 1, "ended": [asdict(r) for r in results]}, indent=1))
    else:
        for result in results:
            print(f"pid {result.pid}: {result.outcome}")
    return 0 if all(r.outcome != "still there" for r in results) else 1


def _with_jobs(view: GpuView) -> GpuView:
    from k2tui.core.gpu import JobProcess, with_jobs
    from k2tui.jobs import folder

    return with_jobs(view, [JobProcess(j.spec.id, j.pid, j.state.is_final) for j in folder.list_jobs()])
