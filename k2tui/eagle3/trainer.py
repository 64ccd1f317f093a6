"""The run: data, steps, evaluation, saves, exact resume, alarms, exports. Everything it decides is in metrics.jsonl.

Law: what a run does after a save depends on the save and the options alone, so that a resumed run prints the same numbers as
one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k2tui.core.job_text import duration
from k2tui.core.training import STEP_NOTE
from k2tui.eagle3 import guard, ops, saves
from k2tui.eagle3.batch import Pack, Sample, count_steps
from k2tui.eagle3.card import model_card
from k2tui.eagle3.checkpoint import fill_draft, read_tensors
from k2tui.eagle3.data import (
    FolderStates,
    Loader,
    States,
    StepPlan,
    Subset,
    make_pack,
    open_states,
    plan_epoch,
    share,
    split,
)
from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
from k2tui.eagle3.evaluate import ChainReport, EvalReport, evaluate, replay_chains
from k2tui.eagle3.export import export_draft
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.progress import Pace, Progress
from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.step import OptimOptions, Stepper, StepReport, TttModule
from k2tui.eagle3.target import Target, draft_config_for, load_target, target_folder
from k2tui.eagle3.ttt import TttOptions
from k2tui.eagle3.vocab import choose_vocab, count_tokens, special_ids
from k2tui.errors import K2Error
from k2tui.jobs.report import report_progress, report_result
from k2tui.parsing import parse_json
from k2tui.regular import open_regular

FIRST_TOKENS = 65536  # held-out tokens that judge a draft before its first step, where it starts from nothing
NO_SIGNAL_STEPS = 10
NOT_FINITE_STEPS = 3
_PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40": 181.0,
}  # dense bf16


@dataclass(frozen=True)
class TrainOptions:
    """One run. Lengths in tokens, intervals in optimiser steps (0 = never), held_out a share of the samples.

    init: a draft checkpoint to start from (keeps its vocabulary map), "" = from scratch. denominator: "mask" (loss-bearing
    positions of the batch) or "rows" (samples x longest, as SpecForge divides). dtype: "auto" = bf16 on a GPU, fp32 on a CPU.
    keep_first: export the untrained draft too (draft-first), to be served beside the trained one.
    """

    states: str
    target: str
    out: str
    init: str = ""
    eval_states: str = ""
    held_out: float = 0.05
    epochs: int = 2
    max_steps: int = 0
    batch_size: int = 8
    max_tokens: int = 16384
    max_length: int = 0
    seed: int = 0
    draft_vocab_size: int = 0
    draft_config: str = ""
    boundaries: str = ""
    ttt: TttOptions = field(default_factory=TttOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    denominator: str = "mask"
    dtype: str = "auto"
    device: str = "auto"
    shard: bool = False
    compile: bool = True
    eval_every: int = 0
    save_every: int = 0
    log_every: int = 1
    num_steps: int = 3
    patience: int = 0
    keep: int = 2
    chains: int = 16
    keep_first: bool = False
    accept: tuple[str, ...] = ()
    tensorboard: bool = False
    resume: bool = True
    served_version: str = "0.5.23"

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with the run that it continues."""
        raw = asdict(self)
        for key in (
            "out",
            "device",
            "shard",
            "compile",
            "eval_every",
            "save_every",
            "log_every",
            "keep",
            "chains",
            "keep_first",
            "accept",
            "tensorboard",
            "resume",
            "patience",
            "target",
            "states",
            "eval_states",
        ):
            raw.pop(key)
        raw["ttt"].pop("recompute")
        raw["ttt"].pop("chunk_rows")
        return json.loads(json.dumps(raw))


class Metrics:
    """metrics.jsonl: one writer, appended; cut back to the resumed step, so that no step stands there twice."""

    def __init__(self, path: Path, from_step: int, tensorboard: bool) -> None:
        self.path = path
        self.warned = False
        if path.exists():
            from k2tui.files import write_whole

            write_whole(path, b"".join(_rows_until(path, from_step)), mode=0o644)
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter  # type: ignore[import-not-found]
            except ImportError:
                raise K2Error(
                    "--tensorboard needs the package tensorboard",
                    "pip install tensorboard, or leave the flag out: metrics.jsonl has everything",
                )
            self.board = SummaryWriter(str(path.parent / "tensorboard"))

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as fh:
                fh.write(json.dumps(row) + "\n")
        except OSError as err:
            if not self.warned:
                print(
                    f"warning: {self.path}: {err.strerror or err}; figures are not kept until there is room",
                    file=sys.stderr,
                )
                self.warned = True
        if self.board is not None:
            for key, value in row.items():
                if isinstance(value, int | float) and key not in ("step", "at_s"):
                    self.board.add_scalar(f"{row['kind']}/{key}", value, row["step"])
                elif isinstance(value, list):
                    for n, part in enumerate(value):
                        self.board.add_scalar(f"{row['kind']}/{key}_{n}", part, row["step"])


def _rows_until(path: Path, step: int) -> list[bytes]:
    """The lines up to this step; none for step 0, then nobody reads them. Raises K2Error naming the line."""
    kept: list[bytes] = []
    try:
        with open_regular(path) as fh:
            for number, line in enumerate(fh if step else (), 1):
                try:
                    row = parse_json(line)
                except ValueError:
                    continue  # a line cut by a crash
                at = row.get("step") if isinstance(row, dict) else None
                if not isinstance(at, int) or isinstance(at, bool):
                    raise K2Error(f"{path} line {number}: no step of a run (an object with a whole number `step`)", "remove that line")
                if at <= step:
                    kept.append(line.rstrip(b"\r\n") + b"\n")
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}", "remove it, or choose another --out")
    return kept


@dataclass
class _Place:
    """Where the run stands: the next step to do. Everything that a resume needs besides weights and moments."""

    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    best: float = 0.0
    best_step: int = -1
    evals_without_gain: int = 0
    bad_steps: int = 0
    silent_steps: int = 0
    first: float = 0.0  # expected accept length before the first step; 0 = not measured
    first_chain: float = 0.0  # the same by chain drafting

    @classmethod
    def read(cls, where: Path, raw: Mapping[str, Any], total: int) -> _Place:
        """Of a save's state.json. Raises K2Error naming what is wrong."""
        known = {f.name: type(f.default) for f in fields(cls)}
        for key, value in raw.items():
            number = (int,) if known.get(key) is int else (int, float)
            if key not in known or isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value):
                raise K2Error(f"{where}: place: {key} {str(value)[:40]}: no such place in a run", saves.DELETE)
        if not 0 < raw.get("step", 0) <= total:
            raise K2Error(f"{where}: place: step {raw.get('step')} of a run of {total} steps", saves.DELETE)
        return cls(**raw)


class Trainer:
    """Builds everything from the options, then `run()`. say: one line for people (progress on stderr by default)."""

    def __init__(self, options: TrainOptions, say: Callable[[str], None] | None = None) -> None:
        self.options = o = options
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.ranks = Ranks.start(o.device, sharded=o.shard)
        if not self.ranks.is_first:
            self.say = lambda text: None
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(o.dtype) or (
            torch.bfloat16 if self.ranks.device.type == "cuda" else torch.float32
        )
        ops.set_compile(o.compile and self.ranks.device.type == "cuda")
        self.out = Path(o.out)
        self.progress = Progress(lambda text: self.say(text))
        self.progress.shown = self.ranks.is_first
        with self.progress.phase("loading the target's embedding and head", quiet=True):
            self.target_folder = target_folder(o.target)
            self.target = load_target(self.target_folder)
        if self.ranks.device.type == "cpu":
            ops.fit_threads(self.target.hidden_size)
        with self.progress.phase(f"opening states {o.states}"):
            self.states, self.held = self._open()
        self.origin = guard.origin_of(self.whole)
        self._guard_target()
        draft, self.notes = self._draft()
        self.resumed = ""  # the step that an earlier run had saved
        self.head = self._head(draft)
        self.progress.note("moving the draft to its device")
        draft = draft.to(self.ranks.device)
        draft.set_embedding(self.target.embedding.to(self.ranks.device, self.dtype))
        self.module = TttModule(draft, self.head, o.ttt)
        if self.ranks.sharded:
            self.ranks.shard(self.module, self.dtype)
        self.stepper = Stepper(self.module, o.optim, self.ranks)
        lengths = self.states.lengths
        self.steps_an_epoch = -(-len(lengths) // o.batch_size)
        self.total = self.steps_an_epoch * o.epochs
        if o.max_steps:
            self.total = min(self.total, o.max_steps)
        self.place = _Place()
        self.progress.total = self.total
        self.progress.pace = Pace(o.eval_every or self.steps_an_epoch, o.save_every or self.steps_an_epoch)
        self.judged: tuple[int, EvalReport] | None = None  # the newest evaluation and its step
        self.stopping = ""
        self._plans: dict[int, list[StepPlan]] = {}
        self._masks: dict[int, Any] = {}

    # ---- building

    def _open(self) -> tuple[States, States]:
        o = self.options
        self.whole = open_states(Path(o.states), o.max_length, self.target.normed)
        if (
            isinstance(self.whole, FolderStates)
            and self.whole.manifest.last_rows == "loss"
            and not o.ttt.shifted
        ):
            raise K2Error(
                f"{o.states}: keeps the last hidden state of loss-bearing rows only; SpecForge's mask rule may need one more",
                "leave --mask at 'next', or extract with --last all",
            )
        if o.eval_states:
            held = open_states(Path(o.eval_states), o.max_length, self.target.normed)
            guard.refuse(
                guard.against_other(guard.origin_of(self.whole), guard.origin_of(held), o.eval_states),
                o.accept,
            )
            return self.whole, held
        return split(self.whole, o.held_out, o.seed)

    def _guard_target(self) -> None:
        o, t = self.options, self.target
        guard.refuse(
            guard.against_target(self.origin, self.target_folder, t.hidden_size, t.vocab_size), o.accept
        )
        sample = self.whole.sample(0)
        if sample.last.shape[1] != t.hidden_size:
            raise K2Error(
                f"{o.states}: states are {sample.last.shape[1]} wide, {o.target} is {t.hidden_size}",
                "give the target that made them",
            )

    def _boundaries(self) -> tuple[int, ...]:
        if self.options.boundaries:
            return tuple(int(b) for b in self.options.boundaries.replace("/", ",").split(","))
        return tuple(self.origin.get("boundaries") or ())

    def _draft(self) -> tuple[Eagle3Draft, list[str]]:
        o, t = self.options, self.target
        boundaries = self._boundaries()
        served = (
            guard.served_ids(boundaries, t.architecture, t.num_layers, o.served_version) if boundaries else ()
        )
        if o.init:
            config = DraftConfig.load(Path(o.init))
            recorded = (
                json.loads((Path(o.init) / "config.json").read_text(encoding="utf-8")).get("k2tui") or {}
            )
            guard.refuse(
                guard.against_draft(
                    self.origin, config, recorded.get("states") or {}, t.architecture, t.num_layers, o.init
                ),
                o.accept,
            )
            if config.vocab_size != t.vocab_size or config.hidden_size != t.hidden_size:
                raise K2Error(
                    f"{o.init}: a draft for {config.vocab_size} tokens and width {config.hidden_size}; {o.target} has {t.vocab_size} and {t.hidden_size}",
                    "this draft belongs to another target",
                )
            if o.draft_vocab_size and o.draft_vocab_size != config.draft_vocab_size:
                raise K2Error(
                    f"{o.init} has a draft vocabulary of {config.draft_vocab_size}",
                    "a warm start keeps its map: leave --draft-vocab-size out",
                )
            draft = Eagle3Draft(config.changed(aux_layer_ids=served or config.aux_layer_ids))
            fill_draft(draft, read_tensors(Path(o.init)), o.init)
            return draft, [f"started from {o.init}, its vocabulary map kept"]
        size = o.draft_vocab_size or min(32000, t.vocab_size)
        with self.progress.phase("counting tokens", len(self.states.lengths), quiet=True) as part:
            counts = count_tokens(self.states, t.vocab_size, part)
        ids, covered = choose_vocab(counts, size, special_ids(self.target_folder, t.vocab_size))
        given: dict[str, Any] = {}
        if o.draft_config:
            given = asdict(DraftConfig.load(Path(o.draft_config)))
            for key in ("vocab_size", "draft_vocab_size", "hidden_size", "aux_layer_ids"):
                given.pop(key)
        width = int(self.whole.sample(0).aux.shape[1]) // t.hidden_size
        config = draft_config_for(t, size, **{**given, "aux_layer_ids": served, "num_aux": width})
        torch.manual_seed(o.seed)
        draft = Eagle3Draft(config)
        draft.set_vocab(ids)
        draft.lm_head.weight.data.copy_(t.head[ids].float())
        return draft, [
            f"started from scratch, head from the target's rows; {size} ids cover {100 * covered:.2f} % of the loss-bearing tokens"
        ]

    def _head(self, draft: Eagle3Draft) -> TargetHead:
        return TargetHead(
            self.target.head.to(self.ranks.device, self.dtype), draft.target_ids().to(self.ranks.device)
        )

    # ---- data

    def _plan(self, step: int) -> StepPlan:
        epoch = step // self.steps_an_epoch
        if epoch not in self._plans:
            o = self.options
            self._plans = {epoch: plan_epoch(self.states.lengths, o.seed, epoch, o.batch_size, o.max_tokens)}
        return self._plans[epoch][step % self.steps_an_epoch]

    def _mine(self, plan: StepPlan) -> list[list[int]]:
        """This rank's packs of a step; [] stands for a pack without labels, so that sharded ranks do equal forwards."""
        lengths, size = self.states.lengths, self.ranks.size
        mine = share(plan, lengths, self.ranks.rank, size)
        if self.ranks.sharded and size > 1:
            most = max(len(share(plan, lengths, r, size)) for r in range(size))
            mine = mine + [[] for _ in range(most - len(mine))]
        return mine

    def _denominators(self, plan: StepPlan) -> list[float]:
        o = self.options
        numbers = [i for one in plan for i in one]
        if o.denominator == "rows":
            return [float(len(numbers) * max(self.states.lengths[i] for i in numbers))] * o.ttt.ttt_length
        for i in numbers:
            if i not in self._masks:
                self._masks[i] = self.states.mask(i)
        return [
            float(n)
            for n in count_steps([self._masks[i] for i in numbers], o.ttt.ttt_length, shifted=o.ttt.shifted)
        ]

    def _make(self, samples: list[Sample]) -> Pack:
        o = self.options
        if samples and samples[0].length == 0:
            first = self.states.sample(0)
            blank = Sample(first.input_ids, torch.zeros_like(first.loss_mask), first.aux, first.last)
            made = make_pack([blank], o.ttt.ttt_length, shifted=o.ttt.shifted, dtype=self.dtype)
            return replace(made, num_tokens=0, num_loss_tokens=0)
        return make_pack(samples, o.ttt.ttt_length, shifted=o.ttt.shifted, dtype=self.dtype)

    def _loader(self, first: int) -> Loader:
        def numbers() -> Iterator[list[int]]:
            # a plan of its own: this runs in the loader's thread
            plans: dict[int, list[StepPlan]] = {}
            o = self.options
            for step in range(first, self.total):
                epoch = step // self.steps_an_epoch
                if epoch not in plans:
                    plans = {
                        epoch: plan_epoch(self.states.lengths, o.seed, epoch, o.batch_size, o.max_tokens)
                    }
                for one in self._mine(plans[epoch][step % self.steps_an_epoch]):
                    yield one or [-1]

        return Loader(_WithBlank(self.states), numbers(), self._make, pin=self.ranks.device.type == "cuda")

    # ---- the run

    def run(self) -> dict[str, Any]:
        """Train to the end (or until told to stop); returns the result that the job reports. Raises K2Error on an alarm."""
        o = self.options
        self.out.mkdir(parents=True, exist_ok=True)
        # asked to start again: saves of the earlier run would outrank the new ones
        if not o.resume and self.ranks.is_first and (gone := saves.clear(self.out / "saves")):
            self.notes.append(f"--no-resume: {gone} save{'s' if gone != 1 else ''} of an earlier run removed")
        resumed = self._resume()
        self.metrics = (
            Metrics(self.out / "metrics.jsonl", self.place.step if resumed else 0, o.tensorboard)
            if self.ranks.is_first
            else None
        )
        previous = (
            {s: signal.signal(s, self._told) for s in (signal.SIGTERM, signal.SIGINT)}
            if _in_main_thread()
            else {}
        )
        began = time.monotonic()
        for note in self.notes:
            self.say(note)
        self.say(
            f"{len(self.states.lengths)} samples, {len(self.held.lengths)} held out; {self.total} steps of {o.batch_size}; {self.ranks.size} rank(s) on {self.ranks.device.type}, {str(self.dtype).removeprefix('torch.')}"
        )
        try:
            if not resumed:
                self._before()
            self._loop()
            return self._finish(time.monotonic() - began)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _before(self) -> None:
        """What the untrained draft is worth: every later figure is read against it."""
        report = self._evaluate(0)
        # every rank takes part
        weights = saves.gather(self.stepper)[0] if self.options.keep_first or self.ranks.sharded else {}
        if not self.ranks.is_first:
            return
        if report is not None:
            self.place.first = report.accept_length
            self.say(f"before training: expected accept length {report.accept_length:.3f}")
        chain = self._chain(weights)
        self.place.first_chain = chain.accept_length if chain is not None else 0.0
        if self.options.keep_first:
            self._export("draft-first", weights, report, chain)

    def _chain(self, weights: Mapping[str, Tensor]) -> ChainReport | None:
        """Chain drafting along the first held-out samples; None when there are none. It runs where the draft is, but for a
        sharded draft, which no device holds whole: there the CPU drafts with `weights`."""
        o = self.options
        count = min(o.chains, len(self.held.lengths))
        if not count:
            return None
        draft = self.module.draft
        if self.ranks.sharded:
            draft = self._whole_draft(weights)
            draft.set_embedding(self.target.embedding.float())
        with self.progress.phase("chain drafting on held-out text", count, cost="chain") as part:
            return replay_chains(draft, self.held, range(count), num_steps=o.num_steps, told=part)

    def _told(self, number: int, _: Any) -> None:
        self.stopping = signal.Signals(number).name

    def _resume(self) -> bool:
        o = self.options
        save = saves.last_save(self.out / "saves") if o.resume else None
        if save is None:
            return False
        facts = saves.read_facts(save)
        mine, theirs = o.fingerprint(), facts.get("options", {})
        changed = [k for k in mine if mine[k] != theirs.get(k, mine[k])]
        if changed:
            raise K2Error(
                f"{save}: that run had another {', '.join(changed)}",
                "give the same options, choose another --out, or --no-resume to start again there",
            )
        guard.refuse(
            guard.against_other(self.origin, facts.get("states") or {}, "the interrupted run"), o.accept
        )
        if facts.get("samples") != self._samples_hash():
            raise K2Error(
                f"{save}: that run read other samples than {o.states} holds now",
                "give the same states, or choose another --out",
            )
        place = _Place.read(save / "state.json", facts["place"], self.total)
        saves.restore(save, self.stepper)
        self.place = place
        self.resumed = self.progress.resumed = f"step {self.place.step}"
        self.progress.step = self.place.step
        self.notes = [f"resumed after step {self.place.step} of {self.total}"]
        return True

    def _loop(self) -> None:
        o = self.options
        loader = self._loader(self.place.step)
        if self.place.step < self.total:
            compiles = self.options.compile and self.ranks.device.type == "cuda"
            what = "first step (torch.compile and kernels: it takes longest)" if compiles else "first step"
            self.progress.note(what)
            self.say(what)
        mark, mark_tokens, mark_loss, mark_flops, waited = time.monotonic(), 0, 0, 0.0, 0.0
        try:
            while self.place.step < self.total:
                began = time.monotonic()
                plan = self._plan(self.place.step)
                packs: list[Pack] = []
                before = time.monotonic()
                for _ in self._mine(plan):
                    packs.append(next(loader))
                waited += time.monotonic() - before
                report = self.stepper.run(
                    (p.to(self.ranks.device) for p in packs),
                    self._denominators(plan),
                    self.place.step,
                    self.total,
                )
                self.place.step += 1
                self.place.tokens += report.tokens
                self.place.loss_tokens += report.loss_tokens
                mark_tokens, mark_loss, mark_flops = (
                    mark_tokens + report.tokens,
                    mark_loss + report.loss_tokens,
                    mark_flops + report.flops,
                )
                step = self.progress.step = self.place.step
                ended = step == self.total
                if self.progress.pace is not None:
                    self.progress.pace.step(time.monotonic() - began)
                if step % o.log_every == 0 or ended:
                    now = time.monotonic()
                    self._log(report, now - mark, mark_tokens, mark_loss, mark_flops, waited)
                    mark, mark_tokens, mark_loss, mark_flops, waited = now, 0, 0, 0.0, 0.0
                away = time.monotonic()
                self._alarms(report)
                stop = self.ranks.tell(1.0 if self.stopping else 0.0) > 0
                if (
                    (o.eval_every and step % o.eval_every == 0)
                    or ended
                    or (not o.eval_every and step % self.steps_an_epoch == 0)
                ):
                    self._evaluate(step)
                if (
                    stop
                    or ended
                    or (o.save_every and step % o.save_every == 0)
                    or (not o.save_every and step % self.steps_an_epoch == 0)
                ):
                    with self.progress.phase("saving", cost="save", quiet=True):
                        self._save()
                mark += time.monotonic() - away  # what stands beside the steps is not their speed
                if stop or (o.patience and self.place.evals_without_gain >= o.patience):
                    self.stopping = self.stopping or "no gain"
                    break
        finally:
            loader.stop()

    def _log(
        self,
        report: StepReport,
        seconds: float,
        tokens: int,
        loss_tokens: int,
        flops: float,
        waited: float,
    ) -> None:
        if not self.ranks.is_first or self.metrics is None:
            return
        device = self.ranks.device
        eta = 0.0 if self.place.step == self.total else self.progress.eta_s
        peak = (
            next((v for k, v in _PEAK_TFLOPS.items() if k in torch.cuda.get_device_name(device)), None)
            if device.type == "cuda"
            else None
        )
        full = _product(report.accuracy[: self.options.num_steps])
        row = {
            "kind": "step", "step": self.place.step, "epoch": (self.place.step - 1) // self.steps_an_epoch, "loss": report.loss, "losses": list(report.losses),
            "accuracy": list(report.accuracy), "accept_length_guess": full, "learning_rate": report.learning_rate, "grad_norm": report.grad_norm,
            "tokens": self.place.tokens, "loss_tokens": self.place.loss_tokens, "tok_s": tokens / seconds, "loss_tok_s": loss_tokens / seconds,
            "mfu": flops / seconds / (peak * 1e12) if peak else None, "memory_b": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "wait_share": waited / seconds, "eta_s": eta, "at_s": time.time(),
        }  # fmt: skip
        self.metrics.write(row)
        note = f"{STEP_NOTE}{report.loss:.4f}, acc {report.accuracy[0]:.3f}, {tokens / seconds:.0f} tok/s"
        report_progress(
            self.place.step,
            self.total,
            "steps",
            note,
            eta,
            resumed=self.resumed,
            force=self.place.step == self.total,
        )
        if self.place.step % max(1, self.total // 50) == 0 or self.place.step in (1, self.total):
            left = f", {duration(eta)} left" if eta is not None else ""
            self.say(f"step {self.place.step}/{self.total}: {note}, lr {report.learning_rate:.2e}{left}")

    def _alarms(self, report: StepReport) -> None:
        p = self.place
        p.bad_steps = 0 if report.is_finite else p.bad_steps + 1
        if not report.is_finite:
            self.say(
                f"warning: step {p.step}: loss {report.loss}, gradient norm {report.grad_norm}: the weights were left as they are"
            )
        if p.bad_steps >= NOT_FINITE_STEPS:
            raise K2Error(
                f"loss or gradient not finite in {p.bad_steps} steps in a row (step {p.step})",
                "the newest save is from before: lower the learning rate, or check the states with `k2tui states check`",
            )
        silent = report.loss == 0.0 and not any(report.accuracy)
        p.silent_steps = p.silent_steps + 1 if silent else 0
        if p.silent_steps >= min(NO_SIGNAL_STEPS, self.total):
            raise K2Error(
                f"no signal: loss and accuracy are 0 in {p.silent_steps} steps in a row",
                "no loss-bearing token reaches the loss: check the loss mask (`k2tui states check`), the draft vocabulary and the chat template",
            )

    def _evaluate(self, step: int) -> EvalReport | None:
        o = self.options
        if not len(self.held.lengths):
            if step:
                self.place.best_step = step
            return None
        held = self.held if step or o.init else _first(self.held, FIRST_TOKENS)
        name = "judging on held-out text" if step else "judging the untrained draft"
        count = len(held.lengths)
        with self.progress.phase(
            name, count, cost="eval", whole=len(self.held.lengths), cold=not step, quiet=step > 0
        ) as part:
            report = evaluate(
                self.module,
                held,
                self.ranks,
                max_tokens=o.max_tokens,
                dtype=self.dtype,
                num_steps=o.num_steps,
                told=part,
            )
        self.judged = (step, report)
        better = report.accept_length > self.place.best + 1e-9
        if step:
            self.place.evals_without_gain = 0 if better else self.place.evals_without_gain + 1
        if better:
            self.place.best = report.accept_length
            self.place.best_step = step
        weights = saves.gather(self.stepper)[0] if better and step else None
        if self.ranks.is_first and self.metrics is not None:
            self.metrics.write(
                {
                    "kind": "eval",
                    "step": step,
                    **{k: list(v) if isinstance(v, tuple) else v for k, v in report.to_dict().items()},
                    "at_s": time.time(),
                }
            )
            if step:
                self.say(
                    f"step {step}: held-out expected accept length {report.accept_length:.3f}, full-prefix accuracy {' '.join(f'{a:.3f}' for a in report.full_acc)}"
                )
            if weights is not None:
                self._export("draft-best", weights, report, None)
        return report

    def _samples_hash(self) -> str:
        """Number and lengths of the samples: the order of training depends on them."""
        text = json.dumps([list(self.states.lengths), list(self.held.lengths)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _save(self) -> None:
        o = self.options
        facts = {
            "step": self.place.step,
            "place": asdict(self.place),
            "options": o.fingerprint(),
            "states": self.origin,
            "total": self.total,
            "samples": self._samples_hash(),
        }
        done = saves.write_save(self.out / "saves", self.stepper, facts, self.ranks, keep=o.keep)
        if self.ranks.is_first and done is None:
            self.say(
                f"warning: {self.out}/saves: no room for a save; the one before it stands, training goes on"
            )

    def _whole_draft(self, weights: Mapping[str, Tensor]) -> Eagle3Draft:
        own = self.module.draft
        draft = Eagle3Draft(own.config)
        draft.set_vocab(own.target_ids().cpu())
        for name, p in draft.named_parameters():
            p.data.copy_(weights[name])
        return draft

    def _export(
        self, name: str, weights: Mapping[str, Tensor], report: EvalReport | None, chain: ChainReport | None
    ) -> None:
        facts = {
            "states": self.origin,
            "step": self.place.step,
            "target": self.options.target,
            "tokens": self.place.tokens,
            "loss_tokens": self.place.loss_tokens,
        }
        card = model_card(self.options, self.module.draft.config, facts, report, chain)
        try:
            with self.progress.phase(f"writing {name}", quiet=True):
                export_draft(self._whole_draft(weights), self.out / name, card, extra=facts)
        except K2Error as err:
            self.say(f"warning: {err.message}; {err.hint}")

    def _finish(self, seconds: float) -> dict[str, Any]:
        o = self.options
        weights, _ = saves.gather(self.stepper)
        result: dict[str, Any] = {}
        last = None
        if len(self.held.lengths):
            if self.judged is not None and self.judged[0] == self.place.step:
                last = self.judged[1]  # these very weights
            else:
                with self.progress.phase("judging on held-out text", len(self.held.lengths)) as part:
                    last = evaluate(
                        self.module,
                        self.held,
                        self.ranks,
                        max_tokens=o.max_tokens,
                        dtype=self.dtype,
                        num_steps=o.num_steps,
                        told=part,
                    )
        if self.ranks.is_first:
            chain = self._chain(weights)
            if chain is not None:
                self.say(
                    f"chain drafting on held-out text: accept length {chain.accept_length:.3f} ({chain.verify_ct} drafts)"
                )
            self._export("draft-last", weights, last, chain)
            best = self.out / "draft-best"
            result = {
                "draft": str(best if self.place.best_step > 0 and best.exists() else self.out / "draft-last"), "draft_last": str(self.out / "draft-last"), "step": self.place.step, "total": self.total,
                "expected_accept_length": self.place.best if last else None, "best_step": self.place.best_step, "last_accept_length": last.accept_length if last else None,
                "untrained_accept_length": self.place.first or None, "untrained_chain_accept_length": self.place.first_chain or None,
                "draft_first": str(self.out / "draft-first") if o.keep_first else None, "full_acc": list(last.full_acc) if last else None, "chain_accept_length": chain.accept_length if chain else None, "tokens": self.place.tokens,
                "loss_tokens": self.place.loss_tokens, "seconds": seconds, "stopped": self.stopping,
            }  # fmt: skip
            report_result(result)
            self.progress.note("done" if self.place.step == self.total else f"stopped: {self.stopping}")
        self.ranks.wait()
        return result


def _first(states: States, tokens: int) -> States:
    """The first samples of these, up to this many tokens (one at least)."""
    room, count = tokens, 0
    for length in states.lengths:
        room -= length
        if count and room < 0:
            break
        count += 1
    return states if count == len(states.lengths) else Subset(states, tuple(range(count)))


class _WithBlank:
    """The samples, and under -1 one of no tokens: the mark of a pack without labels."""

    def __init__(self, whole: States) -> None:
        self.whole = whole
        self.lengths = whole.lengths

    def mask(self, index: int) -> Any:
        return self.whole.mask(index)

    def ids(self, index: int) -> Any:
        return self.whole.ids(index)

    def sample(self, index: int) -> Sample:
        if index < 0:
            return Sample(
                torch.zeros(0, dtype=torch.int64),
                torch.zeros(0, dtype=torch.bool),
                torch.zeros(0, 0),
                torch.zeros(0, 0),
            )
        return self.whole.sample(index)


def _product(accuracy: tuple[float, ...]) -> float:
    total = held = 1.0
    for a in accuracy:
        held *= a
        total += held
    return total


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread() and os.name == "posix"


__all__ = ["Subset", "Target", "TrainOptions", "Trainer"]
