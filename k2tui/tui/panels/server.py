"""The server at a glance: state in a word, shards or serving figures, the phases with their times, and one sentence."""

from __future__ import annotations

from k2tui.core.load import LoadView, Phase, PhaseSpan, ShardCount, State
from k2tui.core.snapshot import ServerView
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, bar, fit, line_width, spark, spread, text_line, wrap
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import STATE_ROLES, View

SHORTEST_S = 0.05
TRIAL = "tuning trial"  # a server that a tuning run started for one measurement

PHASE_WORDS = {
    Phase.BOOT: "boot",
    Phase.DIST_INIT: "dist",
    Phase.WEIGHT_LOAD: "weights",
    Phase.DRAFT_LOAD: "draft",
    Phase.AFTER_LOAD: "after",
    Phase.KV_ALLOC: "kv",
    Phase.GRAPH_CAPTURE: "graphs",
    Phase.WARMUP: "warmup",
    Phase.HTTP: "http",
    Phase.SERVING: "serving",
    Phase.SHUTDOWN: "shutdown",
}


def phase_word(phase: Phase) -> str:
    return PHASE_WORDS.get(phase, phase.value)


def model_name(server: ServerView) -> str:
    """What users ask for in a request, else the last part of the model's path."""
    http = server.http
    name = (http.served_model_name or http.model_path or "") if http is not None else ""
    name = name or server.load.model or server.title
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", "~", ".")) else name


def readiness(server: ServerView) -> Seg:
    """What /health says, apart from what the log says."""
    http = server.http
    if http is None:
        return Seg("not asked yet", "dim")
    if http.health == 200:
        return Seg("health 200", "ok")
    if http.health is not None:
        return Seg(f"health {http.health}", "warn")
    return Seg("log only" if server.job is None and server.log_key else "no answer", "dim")


def head_line(server: ServerView, view: View, width: int) -> Line:
    """State, model, engine, address | readiness, time."""
    load = server.load
    role = STATE_ROLES[load.state]
    engine = load.engine or (server.job.spec.stage if server.job else "")
    if server.http is not None and server.http.is_embedded:
        engine = "embedded engine"
    version = load.version or (server.http.version if server.http else None) or ""
    left = [
        Seg(f"{view.state_mark(load)} {load.state.value.upper()}", f"{role} bold"),
        Seg(f"  {model_name(server)}", "bold"),
        Seg(f"  {engine} {version}".rstrip(), "dim"),
    ]
    if load.tp_size and load.tp_size > 1:
        left.append(Seg(f" TP{load.tp_size}", "dim"))
    url = load.url or (server.http.url if server.http else "")
    if url and width >= 100:
        left.append(Seg(f"  {url}", "dim"))
    right: list[Seg] = [readiness(server)]
    if load.started_s is not None and load.state not in (State.STOPPED, State.FAILED):
        right.append(Seg(f"  {fmt.age(view.now_s - load.started_s)}", ""))
    if load.state is State.READY and load.ready_s is not None:
        took = Seg(f"  ready in {fmt.duration(load.ready_s)}", "dim")
        if line_width(left) + line_width(right) + len(took.text) < width:
            right.insert(1, took)
    return spread(left, right, width)


def _shards(word: str, count: ShardCount | None, cells: int, view: View) -> list[Seg]:
    if count is None:
        return [Seg(f"{word} ", "dim"), *bar(None, cells, "bar", view.glyphs), Seg(" -/-", "dim")]
    share = count.done / count.total if count.total else 0.0
    role = "ok" if count.total and count.done >= count.total else "bar"
    return [Seg(f"{word} ", "dim"), *bar(share, cells, role, view.glyphs), Seg(f" {count.done}/{count.total}", "bold")]


def rate_text(load: LoadView) -> str:
    """Loading speed: bytes when the shards' sizes are known, else shards."""
    if not load.shards_per_s:
        return ""
    if load.bytes_total and load.target is not None and load.target.total:
        return f"{fmt.size(load.shards_per_s * load.bytes_total / load.target.total)}B/s"
    if load.shards_per_s < 1:
        return f"{1 / load.shards_per_s:.1f} s/shard"
    return f"{fmt.count(load.shards_per_s)} shards/s"


def eta_text(load: LoadView, view: View) -> str:
    if load.eta_s is None:
        return ""
    error = "" if load.eta_error_s is None else f" {view.glyphs.plus_minus}{fmt.duration(load.eta_error_s)}"
    return f"ready in {fmt.duration(load.eta_s)}{error}"


def load_line(server: ServerView, view: View, width: int) -> Line:
    """Shards of target and draft, rate, ETA."""
    load = server.load
    right: list[Seg] = []
    if text := rate_text(load):
        right.append(Seg(text, ""))
    if text := eta_text(load, view):
        right.append(Seg(("  " if right else "") + text, "bold"))
    has_draft = load.draft is not None
    fixed = 7 + 8 + (6 + 9 if has_draft else 0) + line_width(right) + 2
    room = max(8, width - fixed)
    left = _shards("target", load.target, min(60, room * 2 // 3 if has_draft else room), view)
    if has_draft:
        left += [Seg("  "), *_shards("draft", load.draft, max(4, min(20, room // 3)), view)]
    return spread(left, right, width)


def ranks_line(load: LoadView, view: View, width: int) -> Line:
    """`ranks 5/8 in  TP3 41/64  TP6 -`: how many have their weights, and those that have not, slowest first."""
    late = [r for r in load.rank_loads if not r.is_loaded]
    late.sort(key=lambda r: r.target.done / max(1, r.target.total) if r.target else 0.0)
    count = len(load.rank_loads)
    segs = [Seg("ranks  ", "dim"), Seg(f"{count - len(late)}/{count} in", "ok" if not late else "bold")]
    nodes: dict[str, list[bool]] = {}
    for rank in load.rank_loads:
        nodes.setdefault(rank.node, []).append(rank.is_loaded)
    parts = [f"{node} {sum(loaded)}/{len(loaded)}" for node, loaded in nodes.items() if node] if len(nodes) > 1 else []
    parts += [f"{r.rank} {r.target.done}/{r.target.total}" if r.target else f"{r.rank} -" for r in late]
    for n, part in enumerate(parts):
        more = f"  {view.glyphs.ellipsis}+{len(parts) - n}"
        if line_width(segs) + 2 + len(part) + (len(more) if n + 1 < len(parts) else 0) > width:
            segs.append(Seg(more, "dim"))
            break
        segs.append(Seg(f"  {part}", ""))
    return tuple(segs)


def accuracy_text(load: LoadView) -> str:
    """How good the earlier estimates of such starts were, at the checkpoints inside the shards."""
    told = [a for a in load.eta_accuracy if a.checkpoint.endswith("%")]
    if not told:
        return ""
    parts = ", ".join(f"{a.mean_error_share:.0%} at {a.checkpoint}" for a in told)
    count = max(a.count for a in told)
    return f"earlier ETAs were off by {parts} of the shards ({count} start{'s' if count != 1 else ''})"


def serving_line(server: ServerView, view: View, width: int) -> Line:
    """Requests, KV use, speed and acceptance: from /metrics when it answers, else from the newest decode line."""
    http, decode, g = server.http, server.load.decode, view.glyphs
    has_http = http is not None and http.num_running_reqs is not None
    running = http.num_running_reqs if has_http and http else (decode.num_running_reqs if decode else None)
    queued = http.num_queue_reqs if has_http and http else (decode.num_queue_reqs if decode else None)
    usage = http.token_usage if http is not None and http.token_usage is not None else (decode.token_usage if decode else None)
    speed = (
        http.gen_throughput if http is not None and http.gen_throughput is not None else (decode.gen_throughput if decode else None)
    )
    accept = http.accept_length if http is not None and http.accept_length else (decode.accept_length if decode else None)
    segs = [
        Seg("run ", "dim"),
        Seg(f"{fmt.count(running):<4}", "bold"),
        Seg("queue ", "dim"),
        Seg(f"{fmt.count(queued):<4}", "warn bold" if queued else "bold"),
        Seg("kv ", "dim"),
        *bar(usage, 8, "mem" if (usage or 0) < 0.9 else "warn", g),
        Seg(f" {fmt.percent(usage):<5}"),
        Seg("tok/s ", "dim"),
        Seg(f"{fmt.count(speed):<6}", "bold"),
    ]
    tail = [Seg("accept ", "dim"), Seg(f"{accept:.2f}" if accept else "n/a", "bold" if accept else "dim")]
    if http is not None and http.cache_hit_rate is not None and width >= 100:
        tail += [Seg("  cache ", "dim"), Seg(fmt.percent(http.cache_hit_rate))]
    room = width - line_width(segs) - line_width(tail) - 2
    if room >= 4:
        cells = min(room, 60)
        segs += [Seg(spark(view.history.get(f"{server.key}.tok_s", 5), cells, None, g), "spark"), Seg("  ")]
    return tuple(segs + tail)


def merged_phases(load: LoadView) -> list[tuple[Phase, float, float | None]]:
    """Spans of the same phase in a row joined: (phase, started_s, ended_s)."""
    out: list[tuple[Phase, float, float | None]] = []
    span: PhaseSpan
    for span in load.phases:
        if out and out[-1][0] == span.phase:
            out[-1] = (span.phase, out[-1][1], span.ended_s)
        else:
            out.append((span.phase, span.started_s, span.ended_s))
    return out


def timeline(server: ServerView, view: View, width: int) -> Line:
    """`✓ boot 3s  ✓ dist 12s  ● weights 3:42`: the newest phases when not all fit."""
    load, g = server.load, view.glyphs
    groups: list[list[Seg]] = []
    alive = load.state not in (State.FAILED, State.STOPPED)
    spans = merged_phases(load)
    for n, (phase, start, end) in enumerate(spans):
        now_in = end is None
        died_in = load.state is State.FAILED and n == len(spans) - 1
        is_short = end is not None and end - start < SHORTEST_S  # less than its stamps can tell: named, without a time
        took = fmt.age(view.now_s - start) if now_in and alive else ("" if end is None or is_short else fmt.duration(end - start))
        if died_in:
            mark, role = g.bad, "bad"
        elif not now_in:
            mark, role = g.ok, "ok"
        elif not alive:
            mark, role = g.skip, "dim"
        elif load.state in (State.STALLED, State.DEGRADED):
            mark, role = g.warn, "warn"
        else:
            mark, role = g.run, "ok" if phase is Phase.SERVING else "info"
        groups.append(
            [Seg(mark, role), Seg(f" {phase_word(phase)}", "bold" if now_in else "dim"), Seg(f" {took}" if took else "", "")]
        )
    cut = False
    while len(groups) > 1 and sum(line_width(x) + 2 for x in groups) + (2 if cut else 0) > width:
        groups.pop(0)
        cut = True
    line: list[Seg] = [Seg(f"{g.ellipsis} ", "dim")] if cut else []
    for n, group in enumerate(groups):
        if n:
            line.append(Seg("  "))
        line += group
    return tuple(line)


def other_line(server: ServerView, view: View, width: int) -> Line:
    """One of the servers that are not in focus."""
    load = server.load
    shards = f"  {load.target.done}/{load.target.total}" if load.state is State.LOADING and load.target is not None else ""
    return spread(
        [
            Seg(f"{view.state_mark(load)} {load.state.value}", STATE_ROLES[load.state]),
            Seg(f"  {model_name(server)}{shards}", ""),
            Seg(f"  {TRIAL}" if server.is_trial else "", "warn"),
            Seg(f"  {load.url}", "dim"),
        ],
        [readiness(server)],
        width,
    )


def verdict_lines(server: ServerView, view: View, width: int, height: int) -> list[Line]:
    """The sentence, then what to do and the proof when something is wrong."""
    load, g = server.load, view.glyphs
    wrong = load.state in (State.FAILED, State.STALLED, State.DEGRADED)
    role = STATE_ROLES[load.state] if wrong else ""
    out: list[Line] = []
    verdict = load.verdict or {
        State.UNKNOWN: "nothing in the log yet",
        State.STOPPED: "stopped",
        State.READY: "ready",
    }.get(load.state, load.state.value)
    room = height - (1 if wrong and load.hint and height > 1 else 0)
    out += [text_line(t, role) for t in wrap(verdict, width, max(1, min(room, 2 if wrong else 1)), g.ellipsis)]
    if wrong and load.hint and len(out) < height:
        out += [text_line(t, "") for t in wrap(load.hint, width, height - len(out), g.ellipsis)]
    if wrong and load.proof_line and len(out) < height:
        number = f"line {load.proof_line_no}: " if load.proof_line_no is not None else ""
        out.append((Seg(number, "dim", "proof"), Seg(fit(load.proof_line, max(1, width - len(number)), ellipsis=g.ellipsis).rstrip(), "dim", "proof")))
    return out[:height]


def draw(view: View, width: int, height: int) -> Picture:
    server = view.server
    if server is None and not view.snap.is_whole:
        return LOOKING
    if server is None:
        lines = [
            text_line("No server yet.", "bold"),
            (Seg("Press ", "dim"), Seg("s", "key", "stage('serve')"), Seg(" to start one, or open the dashboard on a running one:", "dim")),
            text_line("k2tui watch LOG   (a log file, a pid or a URL)", "dim"),
        ]
        return Picture(tuple(Row("", x) for x in lines[:height]))
    load = server.load
    lines = [head_line(server, view, width)]
    others = [s for s in view.snap.servers if s.key != server.key and s.load.state not in (State.STOPPED, State.UNKNOWN)]
    serving = load.decode is not None or (server.http is not None and server.http.num_running_reqs is not None)
    loading = load.state in (State.LOADING, State.STALLED) or (load.target is not None and not serving)
    if loading and (load.target is not None or load.phase is Phase.WEIGHT_LOAD):
        lines.append(load_line(server, view, width))
        if load.rank_loads and height >= 5 and not all(r.is_loaded for r in load.rank_loads):
            lines.append(ranks_line(load, view, width))
    elif serving and load.state not in (State.FAILED, State.STOPPED):
        lines.append(serving_line(server, view, width))
    elif text := eta_text(load, view):
        lines.append(text_line(text, "bold"))
    strip = timeline(server, view, width)
    wrong = load.state in (State.FAILED, State.STALLED, State.DEGRADED)
    rest = max(1, height - len(lines))
    if strip and (rest >= 2):
        lines.append(strip)
        rest -= 1
    spare_for_others = min(len(others), max(0, rest - (3 if wrong else 1)))
    lines += verdict_lines(server, view, width, rest - spare_for_others)
    for note in load.warnings[: max(0, height - len(lines) - spare_for_others)]:
        lines.append((Seg(f"{view.glyphs.warn} ", "warn"), Seg(fit(note, max(1, width - 2), ellipsis=view.glyphs.ellipsis).rstrip(), "dim")))
    if load.state is State.LOADING and len(lines) + spare_for_others < height and (text := accuracy_text(load)):
        lines.append(text_line(fit(text, width, ellipsis=view.glyphs.ellipsis).rstrip(), "dim"))
    lines += [other_line(s, view, width) for s in others[:spare_for_others]]
    count = len(view.snap.servers)
    place = [s.key for s in view.snap.servers].index(server.key) + 1
    corner: Line = (Seg(f"{place} of {count} ", "dim"), Seg("[ ]", "key")) if count > 1 else ()
    if server.is_trial:
        corner = (Seg(f"{TRIAL}{'  ' if corner else ''}", "warn"), *corner)
    return Picture(tuple(Row("", x) for x in lines[:height]), note=corner)


PANEL = Panel(
    "server",
    "Server",
    draw,
    needs=("servers", "is_whole"), ticks=True,
    order=10,
    keys=(("p", "proof", "proof line"), ("l", "open_log", "log"), ("R", "report", "report")),
    help="What the server does, from its log and from its own answers. [ and ] choose among several.",
)
