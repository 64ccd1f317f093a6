"""One extraction from beginning to end: disk need, proofs, the run, the check. Talks to servers and the disk, not to the screen."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from k2tui.capture import ids as layer_ids
from k2tui.capture.client import Extraction, Speed, begin_run, capture_status
from k2tui.capture.control import root_id
from k2tui.capture.lease import LeaseTable
from k2tui.capture.request import is_run_name
from k2tui.dataset.rows import RowFile
from k2tui.errors import K2Error, UsageError
from k2tui.jobs.report import report_progress, report_result
from k2tui.parsing import parse_json
from k2tui.states.layout import Manifest, set_bytes

LOSS_MASK_RULE = (
    "assistant tokens of the data file's loss_mask; `last` kept where mask[t-1], mask[t] or mask[t+1]"
)


class Plan(NamedTuple):
    """What is asked of `extract`. urls: capture servers. out: ROOT/NAME, ROOT being the servers' capture root
    (with several roots on disks of their own only NAME counts).

    ended: "" while a server of one's own lives, else why it does not; then nothing is waited for.
    """

    data: Path
    out: Path
    urls: tuple[str, ...] = ()
    model: Path | None = None
    boundaries: tuple[int, ...] | None = None
    dtype: str = "bf16"
    last_rows: str = "loss"
    limit: int | None = None
    draft: Path | None = None
    probe: int = 0
    concurrency: int = 32
    min_free_b: int = 4_000_000_000
    prove: bool = True
    force: bool = False
    dry_run: bool = False
    ended: Callable[[], str] = str


DraftLoader = Callable[[Path, Path], Any]


def extract(plan: Plan, say: Callable[..., None], draft_loader: DraftLoader | None = None) -> dict[str, Any]:
    """Run a plan. say(text, passing=False): a line for people. Returns the result (also reported to the job).

    Raises K2Error: unusable data file, server without capture, states of another kind in the folder, a disk that is too
    small, a proof that failed (unless plan.force).
    """
    rows = RowFile(plan.data)
    count = len(rows) if plan.limit is None else min(plan.limit, len(rows))
    if not count:
        raise UsageError(f"{plan.data}: no rows", "`k2tui prepare` makes them")
    heads = [rows.head(n) for n in range(count)]
    lengths = [h.seq_len for h in heads]
    run = plan.out.name
    if not is_run_name(run):
        raise UsageError(
            f"--out {plan.out}: the last part of the path must be a plain name",
            "letters, digits, dot, dash, underscore",
        )
    if plan.dry_run and not plan.urls:
        return _dry(plan, lengths, heads, say)
    told = [capture_status(url) for url in plan.urls]
    for url, status in zip(plan.urls, told, strict=True):
        if not status["writers"]:
            raise K2Error(
                f"{url}: no capture writer is alive", "see the server's log for lines of k2tui capture"
            )
    # one folder a disk: nodes with disks of their own each keep the samples that they captured
    parts = {s["root_id"]: Path(s["root"]) / run for s in told}
    if len(parts) == 1 and Path(told[0]["root"]).resolve() != plan.out.parent.resolve():
        raise UsageError(
            f"{plan.urls[0]} captures below {told[0]['root']}, not below {plan.out.parent}",
            f"use --out {Path(told[0]['root']) / run}",
        )
    here = [folder for name, folder in parts.items() if root_id(folder.parent) == name]
    facts = told[0]["writers"][0]["facts"]
    for url, status in zip(plan.urls[1:], told[1:], strict=True):
        other = status["writers"][0]["facts"]
        for key in ("hidden_size", "num_hidden_layers", "vocab_size", "engine_version"):
            if other.get(key) != facts.get(key):
                raise K2Error(
                    f"{url} and {plan.urls[0]} differ in {key}: {other.get(key)} and {facts.get(key)}",
                    "serve one model",
                )
    model = plan.model or Path(facts["model_path"])
    identity = _identity(model)
    available: tuple[int, ...] = tuple(facts["boundaries"])
    layers = int(facts["num_hidden_layers"])

    proofs: dict[str, Any] = {}
    boundaries = plan.boundaries or _default_boundaries(available, layers)
    candidates: list[tuple[int, ...]] = []
    if plan.draft:
        candidates = [
            c for c in layer_ids.candidate_sets(_draft_ids(plan.draft), layers) if set(c) <= set(available)
        ]
        if plan.boundaries and plan.boundaries not in candidates:
            candidates.append(plan.boundaries)
        if not candidates:
            raise K2Error(
                f"{plan.draft}: none of its possible layer sets is captured by this server, which has {list(available)}",
                "start the server with K2TUI_CAPTURE_BOUNDARIES naming them all, or leave it unset",
            )
    base = Manifest(
        hidden_size=int(facts["hidden_size"]),
        num_hidden_layers=layers,
        boundaries=boundaries,
        dtype=plan.dtype,
        last_rows=plan.last_rows,
        vocab_size=int(facts.get("vocab_size", 0)),
        loss_mask_rule=LOSS_MASK_RULE,
        data_path=str(plan.data.absolute()),
        data_rows=count,
        data_sha256=rows.sha256(count),
        **identity,
    )
    _check_disk(plan, base, lengths, heads, told, say)
    if plan.dry_run:
        return {"complete": False, "dry_run": True}

    rows_of = _CachedRows(rows)
    if plan.prove:
        proofs = _prove(plan, base, available, candidates, rows_of, lengths, model, say, draft_loader)
        fit = proofs.get("fit")
        if fit and fit["ok"]:
            best = tuple(fit["best"])
            if plan.boundaries and best != plan.boundaries and not plan.force:
                raise K2Error(
                    f"--boundaries {_slash(plan.boundaries)} is not what the draft was trained on: {fit['verdict']}",
                    f"leave --boundaries out, or give {','.join(map(str, best))}; --force goes on",
                )
            boundaries = plan.boundaries or best
    from dataclasses import replace

    manifest = replace(base, boundaries=boundaries)
    begun = begin_run(plan.urls, run, manifest.to_json())
    table = LeaseTable.of(range(count))
    for url in plan.urls:
        there = capture_status(url, run)
        for shard in there["run"]["shards"]:
            table.published(shard["samples"])
    foreign = [i for i in table.done if i >= count]
    table.done.difference_update(foreign)
    table.waiting = type(table.waiting)(i for i in table.waiting if i not in table.done)
    had = len(table.done)
    resumed = f"sample {had}" if had else ""
    if had:
        _check_same_data(here, rows_of)
        say(f"{had} of {count} samples are there already")
    began = time.monotonic()
    peak: dict[str, float] = {"tokens_s": 0.0}
    limits: dict[str, int] = {}

    def on_speed(speed: Speed) -> None:
        limits[speed.limit] = limits.get(speed.limit, 0) + 1
        peak["tokens_s"] = max(peak["tokens_s"], speed.tokens_s)
        note = (
            speed.paused
            or f"{speed.tokens_s:,.0f} tok/s, {speed.bytes_s / 1e6:,.0f} MB/s, limited by {speed.limit}"
        )
        report_progress(speed.done, speed.total, "samples", note, speed.eta_s, resumed=resumed)
        eta = f", {_clock(speed.eta_s)} left" if speed.eta_s is not None and speed.done < speed.total else ""
        lost = f", {speed.servers} of {len(plan.urls)} servers" if speed.servers < len(plan.urls) else ""
        say(f"{speed.done}/{speed.total} samples, {note}{eta}{lost}", passing=True)

    work = Extraction(
        run,
        plan.urls,
        rows_of,
        lengths,
        table,
        plan.concurrency,
        plan.min_free_b,
        on_speed,
        ended=plan.ended,
    )
    work.execute()
    took = time.monotonic() - began
    report_progress(len(table.done), count, "samples", "done", 0.0, resumed=resumed, force=True)
    tokens = sum(lengths[i] for i in table.done)
    problems: list[str] = []
    if len(table.done) >= count and len(here) == len(parts):
        problems = _check_folders(here, rows_of, count, say)
    elif len(here) < len(parts):
        say("not every folder lies on this machine: run `k2tui states check` where they are joined")
    result = {
        "complete": len(table.done) >= count and not table.failed and not problems,
        "problems": problems[:50],
        "samples": len(table.done),
        "wanted": count,
        "had": had,
        "tokens": tokens,
        "seconds": round(took, 2),
        "tokens_s": round(sum(lengths) / took) if took and not had else None,
        "limited_by": max(limits, key=lambda k: limits[k]) if limits else "",
        "boundaries": list(boundaries),
        "folder": begun["folder"],
        "parts": [str(p) for p in parts.values()],
        "failed": {str(i): r for i, r in sorted(table.failed.items())[:50]},
        "proofs": proofs,
    }
    report_result(result)
    if table.failed:
        worst = next(iter(sorted(table.failed.items())))
        say(f"{len(table.failed)} samples failed; the first: {worst[0]}: {worst[1]}")
    where = ", ".join(map(str, parts.values()))
    say(f"{len(table.done)} of {count} samples, {tokens:,} tokens in {where} ({took:.1f} s)")
    if len(parts) > 1:
        say(
            f"{len(parts)} parts on disks of their own: bring them to one machine, then k2tui states merge OUT PART PART ..."
        )
    return result


class _CachedRows:
    """row(i) for the sender; parses on demand, safe from several threads."""

    def __init__(self, rows: RowFile) -> None:
        self._rows = rows

    def __call__(self, index: int) -> tuple[Any, Any]:
        row = self._rows.row(index)
        return row.input_ids, row.loss_mask


def _identity(model: Path) -> dict[str, Any]:
    from k2tui.capture.model import model_facts

    if not (model / "config.json").is_file():
        return {}  # the server is on another machine: its own facts must do
    facts = model_facts(model)
    return {
        "model_hash": facts.model_hash,
        "tokenizer_hash": facts.tokenizer_hash,
        "template_hash": facts.template_hash,
    }


def _default_boundaries(available: tuple[int, ...], layers: int) -> tuple[int, ...]:
    usual = layer_ids.usual_boundaries(layers)
    if set(usual) <= set(available):
        return usual
    if len(available) <= 3:
        return available
    return tuple(sorted({available[0], available[len(available) // 2], available[-1]}))


def _draft_ids(folder: Path) -> list[int] | None:

    path = folder / "config.json"
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise K2Error(f"{path}: {err}", "give the folder of the draft")
    eagle = raw.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    return [int(i) for i in ids] if ids else None


def _need(plan: Plan, manifest: Manifest, lengths: list[int], heads: list[Any]) -> int:
    tokens = sum(lengths)
    last = tokens if plan.last_rows == "all" else sum(min(h.n_response_tokens + 1, h.seq_len) for h in heads)
    return set_bytes(manifest, tokens, last)


def _check_disk(
    plan: Plan, manifest: Manifest, lengths: list[int], heads: list[Any], told: list[Any], say: Any
) -> None:
    need = _need(plan, manifest, lengths, heads)
    folders = {Path(s["root"]) / plan.out.name for s in told}
    there = sum(p.stat().st_size for f in folders for p in f.glob("states-*.safetensors"))
    free = sum({s["root_id"]: s["free_b"] for s in told}.values())
    per_token = need / max(1, sum(lengths))
    say(
        f"{len(lengths)} samples, {sum(lengths):,} tokens, {per_token:,.0f} B a token: {_size(need)} of disk"
        + (f" ({_size(there)} are there)" if there else "")
        + f", {_size(free)} free"
    )
    if need - there > free - plan.min_free_b and not plan.force:
        raise K2Error(
            f"the states need {_size(need - there)} more, {_size(max(0, free - plan.min_free_b))} may be used",
            "make room, use --dtype fp8_e4m3 or --last loss, take fewer rows with --limit, or --force (it pauses when the disk is full)",
        )


def _dry(plan: Plan, lengths: list[int], heads: list[Any], say: Any) -> dict[str, Any]:
    if plan.model is None:
        raise UsageError("--dry-run needs --model or --url", "the width of the states is the model's")
    from k2tui.capture.model import model_facts

    facts = model_facts(plan.model)
    boundaries = plan.boundaries or layer_ids.usual_boundaries(facts.num_hidden_layers)
    manifest = Manifest(facts.hidden_size, facts.num_hidden_layers, boundaries, plan.dtype, plan.last_rows)
    need = _need(plan, manifest, lengths, heads)
    folder = next(p for p in (plan.out, *plan.out.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    say(
        f"{len(lengths)} samples, {sum(lengths):,} tokens, boundaries {_slash(boundaries)}: {_size(need)} of disk, {_size(free)} free"
    )
    return {
        "complete": False,
        "dry_run": True,
        "bytes": need,
        "free": free,
        "fits": need <= free - plan.min_free_b,
    }


def _prove(
    plan: Plan,
    base: Manifest,
    available: tuple[int, ...],
    candidates: list[tuple[int, ...]],
    rows_of: Any,
    lengths: list[int],
    model: Path,
    say: Any,
    draft_loader: DraftLoader | None,
) -> dict[str, Any]:
    """Both proofs on a few fresh samples in a run of their own, which is removed again. Raises K2Error when one fails."""
    from dataclasses import replace

    from k2tui.capture import align
    from k2tui.capture.model import load_head
    from k2tui.states.reader import StatesReader

    if not (model / "config.json").is_file():
        raise K2Error(f"{model}: the target's folder is not here", "give it with --model, or --no-proof")
    head = load_head(model)
    run = f"{plan.out.name}.probe"
    folder = plan.out.parent / run
    shutil.rmtree(folder, ignore_errors=True)
    wanted = plan.probe or (50 if candidates else 8)
    # spread over the file, so that every source has its part; long samples say no more than short ones
    step = max(1, len(lengths) // wanted)
    chosen = list(range(0, len(lengths), step))[:wanted]
    boundaries = tuple(sorted({b for c in candidates for b in c})) if candidates else base.boundaries
    say(f"proof on {len(chosen)} samples", passing=True)
    url = plan.urls[0]
    begin_run([url], run, replace(base, boundaries=boundaries, dtype="bf16", last_rows="all").to_json())
    try:
        table = LeaseTable.of(chosen)
        Extraction(
            run, [url], rows_of, lengths, table, min(plan.concurrency, 16), 0, ended=plan.ended
        ).execute()
        if table.failed:
            index, reason = next(iter(table.failed.items()))
            raise K2Error(f"the server did not capture sample {index}: {reason}", "nothing was extracted")
        reader = StatesReader(folder)
        out: dict[str, Any] = {}
        head_proof = align.prove_head(reader, head, url, samples=min(8, len(chosen)))
        out["head"] = {
            "ok": head_proof.ok,
            "greedy_agreement": round(head_proof.greedy_agreement, 4),
            "logprob_error": round(head_proof.logprob_error, 4),
            "positions": head_proof.positions,
            "verdict": head_proof.verdict(),
        }
        say(f"proof (a): {head_proof.verdict()}")
        if not head_proof.ok and not plan.force:
            raise K2Error(
                f"proof failed: {head_proof.verdict()}",
                "training on these states would be wasted; --force goes on",
            )
        if candidates and plan.draft and draft_loader:
            fit = align.prove_fit(reader, head, candidates, draft_loader(plan.draft, model), samples=wanted)
            out["fit"] = {
                "ok": fit.ok,
                "best": list(fit.best),
                "accuracy": [[list(c), round(a, 4)] for c, a in fit.accuracy],
                "positions": fit.positions,
                "verdict": fit.verdict(),
            }
            say(f"proof (b): {fit.verdict()}")
            if not fit.ok and not plan.force:
                raise K2Error(
                    f"proof failed: {fit.verdict()}", "leave --draft out to train from scratch, or --force"
                )
        reader.close()
        return out
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_same_data(folders: list[Path], rows_of: Any) -> None:
    """Samples that are there must be rows of this very data file: a spread of 32 is compared, in the folders seen from here."""
    from k2tui.states.reader import StatesReader

    if not folders:
        return  # on other machines; `states check --data` compares everything there
    reader = StatesReader(*folders, allow_empty=True)
    there = reader.indices()
    for position in range(0, len(there), max(1, len(there) // 32)):
        index = there[position]
        if reader.raw(position)["input_ids"].tolist() != list(rows_of(index)[0]):
            raise K2Error(
                f"{folders[0]}: sample {index} there is not line {index + 1} of the data file",
                "these states are of another data file: use a new --out",
            )
    reader.close()


def _check_folders(folders: list[Path], rows_of: Any, count: int, say: Any) -> list[str]:
    """What `states check --quick` would find: every row present, tokens and masks those of the data file."""
    from k2tui.states.check import check_states

    report = check_states(folders, rows_of, count, deep=False)
    found = [*report.problems, *(f"row {i} has no states" for i in report.missing[:20])]
    say(
        f"check: {'clean' if report.ok else found[0]} ({report.samples} samples, {report.bytes / 1e9:.3f} GB)"
    )
    return found


def _slash(boundaries: tuple[int, ...]) -> str:
    return "/".join(map(str, boundaries))


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.0f} KB"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    s = int(seconds)
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"
