"""The dashboard's app: keys and buttons to orders, snapshots to the screen in front. Knows the Backend, never the world behind it.

Laws: frames come as often as `frame_gap` says (1 to 2 a second, quicker after a key); nothing is drawn on hidden screens; every order runs off the event
loop, raises K2Error at most, and its effect is seen in a later snapshot, never assumed; quitting stops no job unless asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme

from k2tui.core.bench import BenchRow
from k2tui.core.board import Task, TaskStatus, job_of, neighbour
from k2tui.core.chain_view import StepState
from k2tui.core.gpu_series import GpuCurves
from k2tui.core.job import Job, JobState
from k2tui.core.job_mask import mask_argv
from k2tui.core.load import State
from k2tui.core.ports import Backend
from k2tui.core.snapshot import ServerView, Snapshot, StageInfo
from k2tui.errors import K2Error
from k2tui.tui import format as fmt
from k2tui.tui.history import History
from k2tui.tui.keys import KEYS, STAGE_KEYS, TABS
from k2tui.tui.lines import ASCII, UNICODE, Line, Seg, text_line, wrap
from k2tui.tui.palette import Palette
from k2tui.tui.panelview import PanelView
from k2tui.tui.screens.deck import KEY_SIGNS, Deck, order_action
from k2tui.tui.screens.overview import OverviewScreen
from k2tui.tui.settings import Settings
from k2tui.tui.terminal import QuietApp
from k2tui.tui.themes import DEFAULT
from k2tui.tui.view import ProcessPick, View
from k2tui.tui.widgets.bar import Button
from k2tui.tui.widgets.lines import Lines
from k2tui.tui.widgets.logview import LogView

START_GAP_S, START_S = 0.04, 1.5  # between frames while the first figures come one after another, and how long
KEY_GAP_S, KEY_GLOW_S = 0.1, 3.0  # the same after a key
WATCHED_GAP_S, WATCHED_S = 0.5, 30.0  # while somebody is likely to look closely, or a log fills the screen
IDLE_GAP_S = 1.0
QUICK_END_S = 10.0  # a job that fails so soon after its form is told with its log's first error

DEFAULT_STAGES = (
    StageInfo("serve", "Start server", "s"),
    StageInfo("bench", "Benchmark", "b"),
    StageInfo("extract", "Extract", "x", unavailable="this build has no extraction stage yet"),
    StageInfo("train", "Train", "t", unavailable="this build has no training stage yet"),
)
ALWAYS_SHOWN = ("serve", "bench", "extract", "train", "pipeline")  # as buttons, even on 80 columns
SHORT_TITLES = {"serve": "Start", "bench": "Bench", "prepare": "Prep", "extract": "Extract", "train": "Train", "evaluate": "Eval", "pipeline": "Pipeline"}
BRIEF_TITLES = {"pipeline": "All"}  # on 80 columns


def _answers(server: ServerView) -> bool:
    return server.http is not None and bool(server.http.model_path) and server.load.state in (State.READY, State.DEGRADED)


def _screen(name: str) -> Callable[[], Screen[Any]]:
    """A screen that is imported and built when it is first shown."""

    def make() -> Screen[Any]:
        import importlib

        module = importlib.import_module(f"k2tui.tui.screens.{name}")
        cls: type[Deck] = getattr(module, f"{name.capitalize()}Screen")
        return cls()

    return make


class Dashboard(QuietApp):
    """The running dashboard. `run()` returns None, or the exit code after a signal."""

    TITLE = "k2tui"
    MODES: ClassVar[dict[str, Any]] = {"overview": OverviewScreen, **{n: _screen(n) for _k, _t, n in TABS if n != "overview"}}
    DEFAULT_MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key.keys, key.action, key.text, show=False, priority=key.keys in ("ctrl+p,colon",) and False)
        for key in KEYS
        if key.action
    ]
    CSS = """
    Deck { background: $background; }
    ToastRack { margin-bottom: 2; }
    Toast { max-width: 72; }
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings | None = None,
        *,
        themes: Sequence[Theme] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        import os

        no_color = "NO_COLOR" in os.environ and os.environ["NO_COLOR"] != ""
        if not no_color:
            os.environ.pop("NO_COLOR", None)  # set but empty means "colours, please"
        super().__init__(ansi_color=True if no_color else None)
        self.backend = backend
        self.settings = settings or Settings()
        self.clock = clock
        self.glyphs = ASCII if self.settings.ascii else UNICODE
        self.history = History()
        self.snap = Snapshot(taken_s=0.0)
        self.view = View(self.snap, clock(), self.history, self.glyphs)
        self.server_key = ""
        self.gpu_sort = ""
        self.job_sort = ""
        self.job_filter = ""
        self.process_pick = ProcessPick()
        self._sees_all_processes = False
        self.messages: list[tuple[float, str, str]] = []
        self._aim: tuple[str, str, str, float] | None = None  # a row to select on a screen that comes: mode, panel, key, until
        self._told_at = 0.0  # when the newest toast came (monotonic)
        self._just_begun: dict[str, float] = {}  # jobs started by a form, and until when their failure is told at once
        self._notices_seen: set[tuple[float, str]] = set()
        self._alerts_seen: int | None = None
        self._undo: tuple[str, str] | None = None  # the task whose status was changed last, and what it was
        self._has_drawn = False
        self._is_due = False
        self._next_draw: asyncio.TimerHandle | None = None
        self._last_draw = 0.0
        self._begun = self._last_key = time.monotonic()
        self._started_s = clock()
        for theme in themes:
            self.register_theme(theme)
        wanted = self.settings.theme or DEFAULT
        if no_color:
            wanted = "ansi-dark"
        self.theme = wanted if wanted in self.available_themes else "textual-dark"
        self.palette = Palette(self.current_theme, no_color=no_color)
        self._is_plain = no_color
        if self.settings.theme and self.settings.theme not in self.available_themes:
            self._say_later(f"no theme {self.settings.theme!r}; T lists them", "warning")
        if self.settings.notice:
            self._say_later(self.settings.notice, "information")

    # -- life

    def on_mount(self) -> None:
        self.watch_terminal()
        self.theme_changed_signal.subscribe(self, self._retheme)
        self.set_interval(max(0.2, self.settings.refresh_s), self._tick)
        self.order(self.backend.start, self._changed, then=lambda _none: self._begin())

    def _begin(self) -> None:
        """The backend has started: the GPUs' last minutes are on disk, so that curves do not begin empty."""
        self.load_gpu_curves(900, 180)
        self.draw_soon()

    def load_gpu_curves(self, span_s: float, steps: int) -> None:
        now = self.clock()
        self.order(self.backend.gpu_curves, now - span_s, now, steps, then=self.history.gpus.load)

    def _changed(self) -> None:
        """From any thread: a new snapshot is worth drawing."""
        loop = self._loop_of_app
        if loop is not None and not self._is_due:
            self._is_due = True
            try:
                loop.call_soon_threadsafe(self.draw_soon)
            except RuntimeError:
                pass  # the loop has ended

    def _tick(self) -> None:
        self.draw_soon()

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key):
            self._last_key = time.monotonic()
        await super().on_event(event)

    def draw_soon(self) -> None:
        """Draw the newest snapshot when the next frame is due."""
        if self._next_draw is not None:
            return
        now = time.monotonic()
        wait = max(0.0, self._last_draw + self.frame_gap(now) - now)
        self._next_draw = asyncio.get_running_loop().call_later(wait, self._draw_due)

    def frame_gap(self, now: float) -> float:
        """Seconds between two frames at that (monotonic) time."""
        if now - self._begun < START_S:
            return START_GAP_S
        since_key = now - self._last_key
        if since_key < KEY_GLOW_S:
            return KEY_GAP_S
        deck = self.deck
        if deck is not None and deck.NAME == "gpu":
            return IDLE_GAP_S  # its figures come once a second
        if since_key < WATCHED_S or (deck is not None and deck.NAME in ("log", "jobs")):
            return WATCHED_GAP_S
        return IDLE_GAP_S

    def _draw_due(self) -> None:
        self._next_draw = None
        if self._running and not self._exit:
            with self._context():
                self.draw_now()

    def draw_now(self) -> None:
        """Take a snapshot and show it on the screen in front."""
        self._is_due = False
        self._last_draw = time.monotonic()
        if self.is_terminal_behind:
            self._is_due = False
            return  # nobody sees it: the next tick tries again
        self.snap = snap = self.backend.snapshot()
        self.history.add(snap)
        deck = self.deck
        task_id = deck.selected_key("board") if deck is not None else ""
        self.view = View(
            snap, self.clock(), self.history, self.glyphs, self.server_key, task_id, self.gpu_sort, process=self.process_pick, job_filter=self.job_filter, job_sort=self.job_sort
        )
        if self._notifications and self._last_key > self._told_at:
            self.clear_notifications()  # a key after it: it was seen, and `m` keeps it
        self._note_notices(snap)
        self._note_quick_failures(snap)
        self._pass_alerts(snap)
        if deck is not None:
            with self.batch_update():
                deck.draw(self.view)
                self._take_aim(deck)

    @property
    def deck(self) -> Deck | None:
        """The topmost screen of panels: what lies under a dialog is still live."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, Deck):
                return screen
        return None

    def _retheme(self, theme: Theme) -> None:
        self.palette = Palette(theme, no_color=self._is_plain)
        for screen in self.screen_stack:
            for widget in screen.query(Lines):
                widget.repaint()

    # -- saying things

    def say(self, text: str, severity: str = "information", hint: str = "") -> None:
        """One message to the user: a toast, and kept under `m`."""
        self.messages.append((self.clock(), severity, f"{text}  {hint}".strip()))
        del self.messages[:-200]
        body = f"{text}\n{hint}" if hint else text
        level: Any = severity if severity in ("information", "warning", "error") else "information"
        self._told_at = time.monotonic()
        self.notify(body, severity=level, timeout=2.5 if severity == "information" else 8, markup=False)

    def _say_later(self, text: str, severity: str) -> None:
        self.call_later(self.say, text, severity)

    def _note_notices(self, snap: Snapshot) -> None:
        for notice in snap.notices:
            mark = (notice.at_s, notice.text)
            if mark in self._notices_seen:
                continue
            self._notices_seen.add(mark)
            if notice.at_s >= self._started_s - 1:
                self.say(notice.text, notice.severity)
            else:
                self.messages.append((notice.at_s, notice.severity, notice.text))

    def _note_quick_failures(self, snap: Snapshot) -> None:
        """A job that fails within seconds of its form was given something wrong: say what."""
        for job in snap.jobs if self._just_begun else ():
            until_s = self._just_begun.get(job.spec.id)
            if until_s is None or not (job.state.is_final or time.monotonic() > until_s):
                continue
            del self._just_begun[job.spec.id]
            if job.state in (JobState.FAILED, JobState.LOST):
                words = f"{job.spec.title or job.spec.stage} failed: {job.reason or job.state.value}"
                self.order(self._first_error, job.spec.id, then=lambda line, words=words: self.say(words, "error", line or "l on the jobs screen shows its log"))

    def _first_error(self, job_id: str) -> str:
        """The first line of a short log that names an error, else its last line, "" for an empty one. Raises K2Error."""
        log = self.backend.log(job_id)
        try:
            lines = [line.strip() for line in log.lines(0, min(log.line_count(), 400)) if line.strip()]
        finally:
            log.close()
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")[:200]

    def _pass_alerts(self, snap: Snapshot) -> None:
        """Bells and notifications of the user's own terminal, each once, in the order of the frames."""
        newest = snap.alerts[-1][0] if snap.alerts else 0
        if self._alerts_seen is None:
            self._alerts_seen = newest  # what was there before this screen is old
        for number, code in snap.alerts:
            if number > self._alerts_seen and self._driver is not None:
                self._driver.write(code)
        self._alerts_seen = max(self._alerts_seen, newest)

    def on_log_view_said(self, event: LogView.Said) -> None:
        self.say(event.text, event.severity)

    def copy_text(self, text: str) -> None:
        """To the clipboard of the user's own terminal (OSC 52)."""
        if not text:
            self.say("nothing to copy here", "warning")
            return
        self.copy_to_clipboard(text)
        lines = text.count("\n") + 1
        self.say(f"copied {lines} lines" if lines > 1 else f"copied: {text[:60]}")

    # -- orders

    def order(self, func: Callable[..., Any], *args: Any, then: Callable[[Any], None] | None = None) -> None:
        """Run an order of the backend off the event loop; its error is shown once."""

        async def run() -> None:
            try:
                result = await asyncio.to_thread(func, *args)
            except K2Error as err:
                self.say(err.message, "error", err.hint)
                return
            except Exception as err:  # the dashboard outlives a fault of one order
                self.say(f"unexpected: {type(err).__name__}: {err}", "error")
                return
            if then is not None:
                then(result)
            self.draw_soon()

        self.run_worker(run, exit_on_error=False)

    @property
    def stages(self) -> Sequence[StageInfo]:
        return self.snap.stages or DEFAULT_STAGES

    def stage_info(self, name: str) -> StageInfo | None:
        """The stage; one that this build lacks is shown and says so."""
        return next((s for s in (*self.stages, *DEFAULT_STAGES) if s.name == name), None)

    def buttons(self) -> list[Button]:
        """The button row: stages, then stop, retry and log."""
        out: list[Button] = []
        taken = {key.show for key in KEYS}
        known = {stage.name for stage in self.stages}
        for stage in [*self.stages, *(s for s in DEFAULT_STAGES if s.name not in known)]:
            key = STAGE_KEYS.get(stage.name, "") or (stage.key if stage.key not in taken else "")
            title = SHORT_TITLES.get(stage.name, stage.title)
            out.append(Button(key, title, f"stage('{stage.name}')", not stage.unavailable, spare=stage.name not in ALWAYS_SHOWN, brief=BRIEF_TITLES.get(stage.name, "")))
            if stage.name == "serve":
                out.append(Button("S", "Stop", "stop_server", self._living_server() is not None))
        out.append(Button("r", "Retry", "retry", any(j.state.is_final for j in self.snap.jobs)))
        out.append(Button("l", "Log", "open_log", bool(self.snap.jobs or self.snap.servers)))
        return out

    def _living_server(self) -> ServerView | None:
        """The server shown, when it is ours and lives: no other is stopped than the one that the user sees."""
        server = self.view.server
        return server if server is not None and server.job is not None and not server.job.state.is_final else None

    def on_lines_pressed(self, event: Lines.Pressed) -> None:
        event.stop()
        self.call_later(self.run_action, event.action)

    def on_panel_view_order(self, event: PanelView.Order) -> None:
        event.stop()
        known: dict[str, Callable[[str], None]] = {
            "open_job_log": self.open_log,
            "delete_job": self.delete_job,
            "open_task": self.open_task,
            "undo_task": lambda _id: self.undo_task(),
            "cycle_task": self.cycle_task,
            "cycle_priority": self.cycle_priority,
            "edit_task": self.edit_task,
            "edit_note": self.edit_note,
            "task_up": lambda task_id: self.move_task(task_id, -1),
            "task_down": lambda task_id: self.move_task(task_id, 1),
            "open_gpu": self.open_gpu,
            "end_process": self.end_process,
            "open_process": self.open_process,
            "tag_process": self.tag_process,
            "process_curves": self.open_process_curves,
            "open_trial": self.open_trial,
            "open_step": self.open_step,
            "run_to_step": lambda step: self._ask_stage("pipeline", {"to": step}),
            "open_step_log": self.open_step_log,
        }
        if event.action in known:
            if event.key:
                known[event.action](event.key)
            return
        self.call_later(self.run_action, event.action)

    def action_stage(self, name: str) -> None:
        """Start a stage: its form first, with the exact command."""
        self._ask_stage(name, {})

    def _ask_stage(self, name: str, first: Mapping[str, str]) -> None:
        """The form of a stage. first: values that its fields begin with."""
        info = self.stage_info(name)
        if info is None:
            self.say(f"there is no stage {name!r} in this build", "warning")
            return
        if info.unavailable:
            self.say(f"{info.title} cannot run now: {info.unavailable}", "warning")
            return
        from k2tui.tui.screens.dialogs import Choice, Field, Launch

        aim = self._aim_of_a_benchmark() if name == "bench" else {}

        async def preview(params: Mapping[str, str]) -> Sequence[str]:
            return await asyncio.to_thread(self.backend.preview, name, {**aim, **params})

        def launch(params: Mapping[str, str] | None) -> None:
            if params is not None:
                self.order(self.backend.submit, name, {**aim, **params}, then=begun)

        def begun(job_id: str) -> None:
            self.say(f"{info.title}: job {job_id}")
            self._just_begun[job_id] = time.monotonic() + QUICK_END_S

        if name == "serve":
            choices = [Choice(p, p, "default" if p == self.snap.profile else "") for p in self.snap.profiles]
            if not choices:
                self.say("no profile is configured", "error", "add [profile.NAME] to ~/.config/k2tui/config.toml")
                return
            form = Launch(
                "Start a server: which profile?",
                preview,
                choices=choices,
                choice_name="profile",
                selected=self.snap.profile,
                run_label="Start server",
            )
        elif name == "bench":
            labels = {
                "concurrency": ("concurrency", "a number, or several: 1,4,8"),
                "num_prompts": ("requests", "how many at each concurrency"),
                "random_input_len": ("input tokens", "of each request"),
                "random_output_len": ("output tokens", "of each request"),
                "seed": ("seed", "the same seed asks the same"),
            }
            fields = [Field(k, labels.get(k, (k, ""))[0], v, labels.get(k, (k, ""))[1]) for k, v in self.settings.bench.items()]
            form = Launch("Benchmark", preview, fields=[*fields, Field("label", "label", "", "a name for the rows (optional)")], run_label="Run benchmark", note=self._note_of_a_benchmark())
        else:
            note = self._nothing_to_run(first.get("to", "")) if name == "pipeline" else ""
            fields = [Field(n, n, first.get(n, value), hint) for n, value, hint in info.fields]
            form = Launch(info.title, preview, fields=fields, run_label=info.title, note=note)
        self.push_screen(form, launch)

    def _aim_of_a_benchmark(self) -> dict[str, str]:
        """The address of the server shown, when it answers; {} leaves it to the backend, which takes one that does."""
        server = self.view.server
        return {"url": server.http.url} if server is not None and server.http is not None and _answers(server) else {}

    def _note_of_a_benchmark(self) -> str:
        """What there is to know about the server that a benchmark would ask."""
        server = self.view.server
        if server is not None and server.is_trial:
            return "The server shown is a tuning trial: it will be stopped soon."
        if server is not None and not _answers(server) and any(_answers(s) for s in self.snap.servers):
            return "The server shown does not answer: this measures another one."
        return ""

    def _nothing_to_run(self, to: str) -> str:
        """Words for a pipeline whose steps (up to `to`) are all done already, "" when some are left."""
        steps = self.snap.chain.steps if self.snap.chain is not None else ()
        names = [s.name for s in steps]
        wanted = steps[: names.index(to) + 1] if to in names else steps
        if not wanted or any(s.state is not StepState.DONE for s in wanted):
            return ""
        return f"All {len(wanted)} steps{f' up to {to}' if to else ''} are done: a run skips what is still valid. `start` runs a step again."

    def open_step(self, step: str) -> None:
        """The step's log; before it has run, what it is."""
        from k2tui.tui.screens.dialogs import Reader

        found = next((s for s in self.snap.chain.steps if s.name == step), None) if self.snap.chain is not None else None
        if found is None or found.job_id:
            self.open_step_log(step)
            return
        facts = [found.title, f"{found.state.value}{': ' if found.words else ''}{found.words}", "It has no log yet. u runs the pipeline up to this step, after a form."]
        width = min(96, self.size.width * 9 // 10 - 4)
        self.push_screen(Reader(f"Step {step}", [text_line(part) for fact in facts for part in wrap(fact, width)]))

    def open_step_log(self, step: str) -> None:
        chain = self.snap.chain
        found = next((s.job_id for s in chain.steps if s.name == step and s.job_id), "") if chain is not None else ""
        if found:
            self.open_log(found)
        else:
            self.say(f"{step} has not run yet", "warning")

    def action_stop_server(self) -> None:
        server = self._living_server()
        if server is None or server.job is None:
            shown = self.view.server
            if shown is not None and shown.job is None:
                self.say("k2tui did not start this server, so it does not stop it", "warning")
            elif shown is not None and len(self.snap.servers) > 1:
                self.say(f"{shown.title} has ended already; [ and ] show the other servers", "warning")
            else:
                self.say("no server of ours is running", "warning")
            return
        lines: list[Line] = [(Seg(server.title, "bold"), Seg(f"  job {server.job.spec.id}", "dim"))]
        load = server.load
        if load.ready_s is not None:
            lines.append(text_line(f"It took {fmt.duration(load.ready_s)} to load; the next start takes that again.", "warn"))
        running = server.http.num_running_reqs if server.http is not None else None
        if running:
            lines.append(text_line(f"{running:g} requests are being answered now.", "warn"))
        for job in self.snap.jobs:
            words = ""
            if job.spec.stage == "pipeline" and job.state is JobState.RUNNING:
                words = f"A pipeline is running (job {job.spec.id}): a step that needs this server will fail."
            elif server.is_trial and job.spec.id == server.job.spec.parent and not job.state.is_final:
                words = f"A tuning run is at work (job {job.spec.id}): its trial on this server will fail."
            lines += [text_line(part, "warn") for part in wrap(words, min(96, self.size.width * 9 // 10 - 4)) if part]
        self._ask_stop("Stop the server?", lines, [server.job], "stop it")

    def action_stop_job(self) -> None:
        job = self._selected_job()
        if job is None:
            self.say("no job is selected", "warning")
            return
        if job.state.is_final:
            self.say(f"{job.spec.title or job.spec.id} has ended already: {job.state.value}", "warning")
            return
        if job.spec.kind == "server":
            server = next((s for s in self.snap.servers if s.job is not None and s.job.spec.id == job.spec.id), None)
            if server is not None:
                self.server_key = server.key
                self.view = View(self.snap, self.clock(), self.history, self.glyphs, self.server_key, "")
                self.action_stop_server()
                return
        lines: list[Line] = [(Seg(job.spec.title or job.spec.stage, "bold"), Seg(f"  job {job.spec.id}", "dim"))]
        lines += [text_line(part, "warn") for part in wrap(self._comes_of_a_stop(job), min(96, self.size.width * 9 // 10 - 4))]
        self._ask_stop("Stop this job?", lines, [job], "stop it")

    def _comes_of_a_stop(self, job: Job) -> str:
        """What else a stop of this job comes to: the job that waits for it fails, and how its own work goes on; "" = nothing."""
        words: list[str] = []
        above = next((j for j in self.snap.jobs if j.spec.id == job.spec.parent and j.spec.stage == "pipeline" and not j.state.is_final), None)
        if above is not None:
            words.append(f"{above.spec.title or above.spec.stage} (job {above.spec.id}) started it and fails with it; run again, it goes on from here.")
        info = self.stage_info(job.spec.stage) if job.spec.params else None
        if info is not None and info.resumes:
            words.append(f"What it did is kept: a retry (r) goes on after {info.resumes}.")
        return " ".join(words)

    def _ask_stop(self, title: str, lines: list[Line], jobs: Sequence[Job], yes: str, *, leave: bool = False) -> None:
        """Shows what will die: the processes by number, GPU and memory; then stops the jobs."""
        from k2tui.tui.screens.dialogs import Confirm

        ids = {job.spec.id for job in jobs}
        processes = [p for p in (self.snap.gpu.processes if self.snap.gpu is not None else ()) if p.job_id in ids]
        lines = [*lines, (), text_line("This will end:", "dim")]
        for job in jobs:
            lines.append((Seg(f"  pid {job.pid or '?'}", "bold"), Seg(f"  {job.spec.title or job.spec.stage}"), Seg(f"  grace {job.spec.grace_s:.0f} s", "dim")))
        for p in processes[:12]:
            lines.append((Seg(f"  pid {p.pid}", "bold"), Seg(f"  GPU {p.gpu_index} {p.rank}  {fmt.size(p.memory_used_b)}  {p.name}", "")))
        if len(processes) > 12:
            lines.append(text_line(f"  and {len(processes) - 12} more", "dim"))

        def answer(agreed: bool | None) -> None:
            if not agreed:
                return

            def stop_all() -> None:
                for job in jobs:
                    self.backend.stop_job(job.spec.id)

            def done(_none: Any) -> None:
                if leave:
                    self.exit()
                else:
                    self.say("asked to stop; the job's line shows when it has")

            self.order(stop_all, then=done)

        self.push_screen(Confirm(title, lines, yes), answer)

    def action_retry(self) -> None:
        job = self._selected_job()
        if job is not None and not job.state.is_final:
            self.say(f"{job.spec.title or job.spec.stage} is {job.state.value}: stop it first (k2tui jobs stop {job.spec.id})", "warning")
            return
        if job is None:
            job = next((j for j in self.snap.jobs if j.state in (JobState.FAILED, JobState.LOST, JobState.STOPPED)), None)
        if job is None:
            self.say("no job that has failed or was stopped", "warning")
            return
        info = self.stage_info(job.spec.stage) if job.spec.params else None
        how = f"goes on after {info.resumes}" if info is not None and info.resumes else "from the beginning"
        title = job.spec.title or job.spec.stage

        def again(agreed: bool | None = True) -> None:
            if agreed:
                self.order(self.backend.retry_job, job.spec.id, then=lambda new: self.say(f"again: {title}, job {new}; {how}"))

        if job.spec.kind != "server":
            again()
            return
        from k2tui.tui.screens.dialogs import Confirm, shell_text

        lines: list[Line] = [(Seg(title, "bold"), Seg(f"  job {job.spec.id}, {job.state.value}", "dim")), (), text_line("This command:", "dim")]
        lines += [text_line(part) for part in wrap(shell_text(mask_argv(job.spec.argv)), min(94, self.size.width * 9 // 10 - 4))]
        self.push_screen(Confirm("Start this server again?", lines, "start it"), again)

    def action_filter_jobs(self) -> None:
        deck = self.deck
        if deck is None:
            return

        def done(text: str) -> None:
            self.job_filter = text.strip()
            self.draw_now()

        deck.ask("show jobs with", self.job_filter, done, replaces=True)

    def delete_job(self, job_id: str) -> None:
        """Asked first: the log goes with it."""
        job = next((j for j in self.snap.jobs if j.spec.id == job_id), None)
        if job is None:
            return
        title = job.spec.title or job.spec.stage
        if not job.state.is_final:
            self.say(f"{title} is {job.state.value}: stop it first (d)", "warning")
            return
        from k2tui.tui.screens.dialogs import Confirm

        lines: list[Line] = [(Seg(title, "bold"), Seg(f"  job {job_id}, {job.state.value}", "dim")), (), text_line("Its folder and its log are removed.")]

        def delete(agreed: bool | None) -> None:
            if agreed:
                self.order(self.backend.delete_job, job_id, then=lambda _none: self.say(f"{title}: removed"))

        self.push_screen(Confirm("Remove this job?", lines, "remove it"), delete)

    def _selected_job(self) -> Job | None:
        """The job in front: of the list; on the board the selected task's, on a log's screen its own."""
        if self.deck is not None and self.deck.NAME in ("board", "log"):
            return self._subject()[0]
        key = self.deck.selected_key("jobs") if self.deck is not None else ""
        return next((j for j in self.snap.jobs if j.spec.id == key), None) if key else None

    # -- logs

    def log_key(self) -> str:
        """The log that `l` opens: the server's, else the newest job's; on the jobs screen the selected job's."""
        deck = self.deck
        job = self._selected_job()
        if job is not None and deck is not None and deck.NAME in ("jobs", "board"):
            return job.spec.id
        server = self.view.server
        if server is not None and server.log_key:
            return server.log_key
        return job.spec.id if job is not None else (self.snap.jobs[0].spec.id if self.snap.jobs else "")

    def action_open_log(self) -> None:
        self.open_log(self.log_key())

    def open_log(self, key: str, proof: tuple[str, int | None] | None = None) -> None:
        if not key:
            self.say("no log yet: nothing was started", "warning")
            return
        from k2tui.tui.screens.log import LogScreen

        self.push_screen(LogScreen(key, proof))

    def show_log(self, deck: Deck, key: str) -> None:
        """Make the deck's log pane show that log, and look for news in it."""
        view = deck.query_one(LogView)
        if getattr(view, "log_key", None) != key:
            view.log_key = key  # type: ignore[attr-defined]
            if not key:
                view.open(None, empty="Select a job to see its log.")
            else:
                try:
                    view.open(self.backend.log(key))
                except K2Error as err:
                    view.open(None, empty=err.message)
            return
        view.poll()

    def follow_server_log(self, deck: Deck) -> None:
        """The pane of the overview: the server's log, else the newest job's."""
        server = self.view.server
        key = server.log_key if server is not None and server.log_key else (self.snap.jobs[0].spec.id if self.snap.jobs else "")
        self.show_log(deck, key)

    def action_proof(self) -> None:
        server = self.view.server
        if server is None or not server.load.proof_line:
            self.say("there is no proving line now", "warning")
            return
        self.open_log(server.log_key, (server.load.proof_line, server.load.proof_line_no))

    def open_trial(self, key: str) -> None:
        """The log of the server that this trial started."""
        run = self.snap.tune
        trial = next((t for t in run.trials if t.key == key), None) if run is not None else None
        if trial is not None and trial.job_id:
            self.open_log(trial.job_id)
        elif trial is not None:
            self.say(f"no server was started for this trial: {trial.cause or trial.state}", "warning")

    # -- GPUs

    def open_gpu(self, key: str) -> None:
        """One GPU in depth."""
        from k2tui.tui.screens.gpudetail import GpuDetailScreen

        if key.isdigit():
            self.push_screen(GpuDetailScreen(int(key)))
            self.call_later(self.draw_now)

    def open_process(self, key: str) -> None:
        """One process in depth: command, parents, children, environment."""
        from k2tui.tui.panels.processes import all_of, key_of

        process = next((p for p in all_of(self.snap) if key_of(p) == key), None)
        if process is None or process.started_s is None:
            self.say("this process is not visible here", "warning")
            return

        def show(facts: Sequence[str]) -> None:
            from k2tui.tui.screens.dialogs import Reader

            width = min(96, self.size.width * 9 // 10 - 4)
            lines = [text_line(part) for fact in facts for part in (wrap(fact, width) if fact else [""])]
            self.push_screen(Reader(f"Process {process.pid}", lines, copy="\n".join(facts)))

        self.order(self.backend.describe_process, process.pid, process.started_s, then=show)

    def action_job_sort(self) -> None:
        from k2tui.tui.panels.jobs import SORTS

        self.job_sort = SORTS[(SORTS.index(self.job_sort) + 1) % len(SORTS)]
        self.draw_now()

    def action_gpu_sort(self) -> None:
        from k2tui.tui.panels.gpus import sort_names

        names = sort_names()
        at = names.index(self.gpu_sort) if self.gpu_sort in names else 0
        self.gpu_sort = names[(at + 1) % len(names)]
        self.draw_now()

    def action_gpu_curves(self) -> None:
        """The GPUs over the time of the selected job, task, log or benchmark."""
        job, task, rows = self._subject()
        if self.deck is not None and self._is_bench_in_front(self.deck):
            chosen = self.deck.selected_key("bench")
            job, rows = None, [r for r in rows if r.run_id == chosen]
        self._curves_of(job, task, rows)

    def _curves_of(self, job: Job | None, task: Task | None, rows: Sequence[BenchRow]) -> None:
        """The curves over the job's time, else over the first row's; `i` in the window offers what belongs to them."""
        title, start, end = "", None, None
        if job is not None:
            title, start, end = f"GPUs during {job.spec.title or job.spec.stage}", job.started_s, job.ended_s or self.clock()
        elif rows:
            row = rows[0]
            title, start, end = f"GPUs during {row.label or row.run_id}", row.started_s, row.started_s + (row.duration_s or 1.0)
        gpu = self.snap.gpu
        has_none = gpu is not None and bool(gpu.error) and not gpu.gpus
        if start is None or end is None:
            self.say("no GPU here" if has_none else "select a job that has started, or a benchmark", "warning")
            return

        from k2tui.tui.gpucurves import lines, steps_for

        width = min(96, self.size.width * 9 // 10 - 4)
        if job is None and rows:
            job = next((j for j in self.snap.jobs if j.spec.id == rows[0].job_id), None) if rows[0].job_id else None

        def show(curves: GpuCurves) -> None:
            if has_none and not curves.gpus:
                self.say("no GPU here", "warning")
                return
            from k2tui.tui.screens.dialogs import Reader

            def then(word: str | None) -> None:
                if word == "links":
                    self._offer_links(job, task, rows)

            self.push_screen(Reader(title, lines(curves, width, self.glyphs), also=("i", "links")), then)

        self.order(self.backend.gpu_curves, start, end + 1, steps_for(width, self.glyphs), then=show)

    def open_process_curves(self, key: str) -> None:
        if key.endswith("/-1"):
            self.say("curves are kept of the processes on the GPUs only")
            return
        from k2tui.tui.screens.process import ProcessScreen

        self.push_screen(ProcessScreen(key))
        self.call_later(self.draw_now)

    def action_all_processes(self) -> None:
        """The busiest processes of the host below those on the GPUs, and back. Only while they are shown are they read."""
        self._sees_all_processes = not self._sees_all_processes
        self.backend.watch_host_processes(self._sees_all_processes)
        self.draw_now()

    def action_process_sort(self) -> None:
        from k2tui.tui.panels.processes import SORTS

        at = SORTS.index(self.process_pick.sort) if self.process_pick.sort in SORTS else 0
        self.process_pick = replace(self.process_pick, sort=SORTS[(at + 1) % len(SORTS)])
        self.draw_now()

    def tag_process(self, key: str) -> None:
        self.process_pick = replace(self.process_pick, tagged=self.process_pick.tagged ^ {key})
        self.draw_now()

    def end_process(self, key: str) -> None:
        """Ends the tagged processes, or this one: by which signal, then whether; pid and birth time name each."""
        from k2tui.tui.processend import ask_end

        ask_end(self, key)

    # -- the board

    def _board_task(self, task_id: str) -> Task | None:
        return next((t for t in self.snap.board.tasks if t.id == task_id), None)

    def open_task(self, task_id: str) -> None:
        """The log of its job when it has one, else the task in full."""
        task = self._board_task(task_id)
        if task is None:
            return
        job = job_of(task, self.snap.jobs)
        if job is not None:
            self.open_log(job.spec.id)
            return
        from k2tui.tui.panels.task import PANEL
        from k2tui.tui.screens.dialogs import Reader

        width = min(96, self.size.width * 9 // 10 - 4)
        picture = PANEL.draw(replace(self.view, task_id=task_id), width, 40)
        self.push_screen(Reader("Task", [row.line for row in picture.rows], copy=task.content))

    def undo_task(self) -> None:
        """The task whose status was changed last gets the status back that it had."""
        if self._undo is None:
            self.say("no status was changed here yet", "warning")
            return
        task_id, status = self._undo
        self._undo = None
        self.order(lambda: self.backend.set_task(task_id, status=status), then=lambda _: self.say(f"back to {status.replace('_', ' ')}"))

    def cycle_task(self, task_id: str) -> None:
        """The next status; one that needs other tasks first is asked about before it starts."""
        task = self._board_task(task_id)
        if task is None:
            return
        order = list(TaskStatus)
        status = order[(order.index(task.status) + 1) % len(order)]

        def set_it(agreed: bool | None = True) -> None:
            if agreed:

                def done(_none: Any) -> None:
                    self._undo = (task_id, task.status.value)
                    if task.status is TaskStatus.COMPLETED:
                        self.say(f"{task.content[:40]}: no longer completed, now {status.value}; u undoes")

                self.order(lambda: self.backend.set_task(task_id, status=status.value), then=done)

        if not task.waiting_for or status not in (TaskStatus.IN_PROGRESS, TaskStatus.COMPLETED):
            set_it()
            return
        from k2tui.tui.screens.dialogs import Confirm

        first = [self._board_task(i) for i in task.waiting_for]
        lines: list[Line] = [(Seg(task.content, "bold"),), (), text_line("It needs these first:", "dim")]
        lines += [(Seg(f"  {t.status.value.replace('_', ' ')}  ", "warn"), Seg(t.content)) for t in first if t is not None]
        self.push_screen(Confirm(f"Set to {status.value.replace('_', ' ')}?", lines, "set it all the same"), set_it)

    def move_task(self, task_id: str, by: int) -> None:
        """Up or down by one among the tasks that the board shows."""
        deck = self.deck
        other = neighbour(self.snap.board.tasks, task_id, by, deck.row_keys("board") if deck is not None else ())
        if other:
            self.order(self.backend.move_task, task_id, other)
        else:
            self.say(f"it is the {'last' if by > 0 else 'first'} one here already", "warning")

    def edit_note(self, task_id: str) -> None:
        task = self._board_task(task_id)
        if task is None or self.deck is None:
            return

        def done(text: str) -> None:
            if text.strip() != task.note:
                self.order(lambda: self.backend.set_task(task_id, note=text.strip()))

        self.deck.ask("note", task.note, done)

    def cycle_priority(self, task_id: str) -> None:
        task = self._board_task(task_id)
        if task is not None:
            order = ("low", "medium", "high")
            at = order.index(task.priority) if task.priority in order else 1
            self.order(lambda: self.backend.set_task(task_id, priority=order[(at + 1) % 3]))

    def action_add_task(self) -> None:
        def done(text: str) -> None:
            urgent = text.startswith("!")
            content = text.lstrip("! ").strip()
            if content:
                self.order(self.backend.add_task, content, "high" if urgent else "medium")

        if self.deck is not None:
            self.deck.ask("new task (! first: high priority)", "", done)

    def edit_task(self, task_id: str) -> None:
        task = self._board_task(task_id)
        if task is None or self.deck is None:
            return

        def done(text: str) -> None:
            if text.strip() and text.strip() != task.content:
                self.order(lambda: self.backend.set_task(task_id, content=text.strip()))

        self.deck.ask("task", task.content, done)

    # -- what belongs together: a job, its task, its benchmark rows, its GPU curves

    def _subject(self) -> tuple[Job | None, Task | None, list[BenchRow]]:
        """What is selected (a log, a task, a benchmark row, else a job), with what belongs to it."""
        deck = self.deck
        if deck is None:
            return None, None, []
        focused = deck.focused
        panel = focused.panel.name if isinstance(focused, PanelView) else ""
        job: Job | None = None
        if deck.NAME == "log" or isinstance(focused, LogView):
            key = str(getattr(deck.query_one(LogView), "log_key", ""))
            job = next((j for j in self.snap.jobs if j.spec.id == key), None)
        elif self._is_bench_in_front(deck):
            row = next((r for r in self.snap.bench if r.run_id == deck.selected_key("bench")), None)
            if row is None:
                return None, None, []
            job = next((j for j in self.snap.jobs if j.spec.id == row.job_id), None) if row.job_id else None
            if job is None:
                return None, None, [row]
        elif panel.startswith("board") or deck.NAME == "board":
            task = self._board_task(deck.selected_key("board"))
            job = job_of(task, self.snap.jobs) if task is not None else None
            if job is None:
                return None, task, []
        else:
            key = deck.selected_key("jobs")
            job = next((j for j in self.snap.jobs if j.spec.id == key), None)
        if job is None:
            return None, None, []
        task = next((t for t in self.snap.board.tasks if job_of(t, self.snap.jobs) is job), None)
        return job, task, [r for r in self.snap.bench if r.job_id == job.spec.id]

    @staticmethod
    def _is_bench_in_front(deck: Deck) -> bool:
        return deck.NAME == "bench" or (isinstance(deck.focused, PanelView) and deck.focused.panel.name == "bench")

    def action_links(self) -> None:
        """Choose among what belongs to the selected job, task, benchmark row or log, and go there."""
        self._offer_links(*self._subject())

    def _offer_links(self, job: Job | None, task: Task | None, rows: Sequence[BenchRow]) -> None:
        from k2tui.tui.benchtext import load, name
        from k2tui.tui.screens.dialogs import Choice, Chooser

        ways: dict[str, Callable[[], None]] = {}
        choices: list[Choice] = []

        def add(label: str, note: str, way: Callable[[], None]) -> None:
            choices.append(Choice(str(len(ways)), label, note))
            ways[str(len(ways))] = way

        if job is not None:
            found = job
            add(f"Log of {found.spec.title or found.spec.stage}", found.spec.id, lambda: self.open_log(found.spec.id))
            add("Job on the jobs screen", found.state.value, lambda: self.go_to("jobs", "jobs", found.spec.id))
        if task is not None:
            task_id = task.id
            add(f"Task: {task.content}", task.status.value.replace("_", " "), lambda: self.go_to("board", "board", task_id))
        for row in rows[:20]:
            add(f"Benchmark: {name(row)}", f"C {load(row)}", lambda run_id=row.run_id: self.go_to("bench", "bench", run_id))
        if rows or (job is not None and job.started_s is not None):
            add("GPUs over its time", "curves", lambda: self._curves_of(job, task, rows))
        if not choices or (task is not None and len(choices) == 1):
            self.say("nothing is linked to this: select a job, a task with a job, or a benchmark", "warning")
            return
        self.push_screen(Chooser("Linked", choices), lambda key: ways[key]() if key else None)

    def action_go(self, what: str) -> None:
        """Straight to the job, the task or the benchmark rows of what is selected."""
        job, task, rows = self._subject()
        if what == "jobs" and job is not None:
            self.go_to("jobs", "jobs", job.spec.id)
        elif what == "board" and task is not None:
            self.go_to("board", "board", task.id)
        elif what == "bench" and rows:
            self.go_to("bench", "bench", rows[0].run_id)
        else:
            self.say({"jobs": "no job is linked to this", "board": "no task is linked to this"}.get(what, "no benchmark rows are linked to this"), "warning")

    def go_to(self, mode: str, panel: str, key: str) -> None:
        """Show that screen with that row selected."""
        self._aim = (mode, panel, key, time.monotonic() + 5.0)
        self.action_show(mode)

    def _take_aim(self, deck: Deck) -> None:
        if self._aim is None:
            return
        mode, panel, key, until_s = self._aim
        if time.monotonic() > until_s or (mode == deck.NAME and deck.go_to(panel, key)):
            self._aim = None

    # -- moving about

    def action_panel_order(self, panel: str, action: str) -> None:
        """A key of that panel, by the palette or a click on its hint."""
        deck = self.deck
        if deck is not None:
            view = deck.query_one(f"#panel-{panel}", PanelView)
            self.on_panel_view_order(PanelView.Order(view, action, view.selected))

    def action_show(self, name: str) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        if self.current_mode != name:
            self.switch_mode(name)
        self.backend.watch_host_processes(self._sees_all_processes and name == "gpu")
        self._last_draw = 0.0
        self.call_later(self.draw_now)

    def action_show_panel(self, name: str) -> None:
        from k2tui.tui.screens.zoom import PanelScreen

        self.push_screen(PanelScreen(name))
        self.call_later(self.draw_now)

    async def action_back(self) -> None:
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def action_next_server(self, step: int) -> None:
        keys = [s.key for s in self.snap.servers]
        server = self.view.server
        if len(keys) > 1 and server is not None:
            self.server_key = keys[(keys.index(server.key) + step) % len(keys)]
            self.draw_now()

    def action_zoom(self) -> None:
        if self.deck is not None:
            self.deck.zoom()

    def action_redraw(self) -> None:
        self.redraw_all()

    # -- help and choices

    def action_help(self) -> None:
        from k2tui.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen(self.glyphs, min(96, self.size.width * 9 // 10 - 4)))

    def action_palette(self) -> None:
        from k2tui.tui import panels
        from k2tui.tui.screens.dialogs import Choice, Chooser

        choices = [Choice(key.action, key.text, key.show) for key in KEYS if key.palette and key.action]
        known = {c.key for c in choices}
        for stage in self.stages:
            action = f"stage('{stage.name}')"
            if action not in known:
                choices.append(Choice(action, stage.title, stage.unavailable and f"not now: {stage.unavailable}", not stage.unavailable))
        choices.append(Choice("save_picture", "Save a picture of this screen (SVG)"))
        choices.append(Choice("add_task", "Add a task to the board", "a"))
        for what, words in (("jobs", "Go to its job"), ("board", "Go to its task"), ("bench", "Go to its benchmark rows")):
            choices.append(Choice(f"go('{what}')", words, "of what is selected"))
        deck = self.deck
        for panel in (w.panel for w in (deck.query(PanelView) if deck is not None else ()) if w.display):
            for key, action, label in panel.keys:
                name = order_action(panel.name, action)
                if name not in {c.key for c in choices} and action not in {c.key for c in choices}:
                    choices.append(Choice(name, f"{panel.title}: {label}", KEY_SIGNS.get(key, key)))
        for job in self.snap.jobs[:20]:
            choices.append(Choice(f"job_log('{job.spec.id}')", f"Log: {job.spec.title or job.spec.stage}", f"{job.state.value} {job.spec.id}"))
        for name in panels.names():
            choices.append(Choice(f"show_panel('{name}')", f"Panel: {panels.get(name).title}", "whole screen"))

        def chosen(action: str | None) -> None:
            if action:
                self.call_later(self.run_action, action)

        self.push_screen(Chooser("Commands", choices), chosen)

    def action_job_log(self, job_id: str) -> None:
        self.open_log(job_id)

    def action_themes(self) -> None:
        from k2tui.tui.screens.dialogs import Choice, Chooser

        if self._is_plain:
            self.say("NO_COLOR is set: there is nothing to choose", "warning")
            return
        before = self.theme
        names = sorted(self.available_themes, key=lambda n: (not n.startswith("k2-"), n))

        def chosen(name: str | None) -> None:
            self.theme = name or before
            if name:
                self.say(f'theme {name}; to keep it: [ui] theme = "{name}" in config.toml')

        choices = [Choice(n, n, "ours" if n.startswith("k2-") else "") for n in names]
        self.push_screen(Chooser("Theme", choices, on_move=lambda name: setattr(self, "theme", name), selected=before), chosen)

    def action_notices(self) -> None:
        from k2tui.tui.screens.dialogs import Reader

        width = min(96, self.size.width * 9 // 10 - 4)
        roles = {"error": "bad", "warning": "warn"}
        lines: list[Line] = []
        for at_s, severity, text in reversed(self.messages):
            for n, part in enumerate(wrap(text, width - 10)):
                lines.append((Seg(f"{fmt.clock(at_s)}  " if n == 0 else " " * 10, "dim"), Seg(part, roles.get(severity, ""))))
        self.push_screen(Reader("Messages", lines or [text_line("None so far.", "dim")]))

    def action_report(self) -> None:
        server = self.view.server
        if server is None:
            self.say("no server to report on", "warning")
            return

        def show(text: str) -> None:
            from k2tui.tui.screens.dialogs import Reader

            width = min(96, self.size.width * 9 // 10 - 4)
            lines = [text_line(part) for line in text.splitlines() for part in wrap(line, width)]

            def then(word: str | None) -> None:
                if word == "saves":
                    self.save(f"report-{server.title}", ".md", text)

            self.push_screen(Reader("Report", lines, copy=text, also=("s", "saves")), then)

        self.order(self.backend.report, server.key, then=show)

    def action_save_picture(self) -> None:
        """The screen as it stands, as SVG."""
        deck = self.deck
        self.save(f"screen-{deck.NAME if deck is not None else 'k2tui'}", ".svg", self.export_screenshot(title="k2tui"))

    def save(self, name: str, suffix: str, text: str) -> None:
        """Keep a text as a file and say where it lies."""

        async def run() -> None:
            from k2tui.exports import save_text

            try:
                path = await save_text(name, suffix, text)
            except K2Error as err:
                self.say(err.message, "error", err.hint)
                return
            self.say(f"saved: {path}")

        self.run_worker(run, exit_on_error=False)

    def action_copy(self) -> None:
        """Copy what is in focus: the log's line, a job's command, the server's address, else the row's text."""
        deck = self.deck
        focused = deck.focused if deck is not None else None
        if isinstance(focused, LogView):
            self.copy_text(focused.copy_text())
            return
        if isinstance(focused, PanelView):
            job = self._selected_job() if focused.panel.name == "jobs" else None
            if job is not None:
                from k2tui.tui.screens.dialogs import shell_text

                self.copy_text(shell_text(job.spec.argv))
                return
            server = self.view.server
            if focused.panel.name in ("server", "phases", "decode") and server is not None:
                self.copy_text(server.load.url or (server.http.url if server.http else ""))
                return
            if focused.panel.name == "diagnosis":
                self.copy_text("\n".join("".join(s.text for s in r.line).rstrip() for r in focused.picture.rows))
                return
            row = next((r for r in focused.picture.rows if r.key == focused.selected), None)
            self.copy_text("".join(s.text for s in row.line).strip() if row is not None else "")
            return
        self.copy_text("")

    # -- leaving

    def action_leave(self) -> None:
        self.exit()

    def action_leave_and_stop(self) -> None:
        running = [j for j in self.snap.jobs if not j.state.is_final]
        if not running:
            self.exit()
            return
        self._ask_stop("Quit, and stop everything that runs?", [], running, "stop all and quit", leave=True)
