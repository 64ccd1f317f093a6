"""The log pane at its moving end leaves out the traces of polls (k2tui's own among them), and shows them when asked."""

from __future__ import annotations

import asyncio

import pytest
from textual.app import App, ComposeResult

from k2tui.core.loadlines import is_poll
from k2tui.sources.logindex import LogFile
from k2tui.tui.palette import Palette
from k2tui.tui.widgets.logview import LogView

POLL = '[2026-11-29 18:10:00] INFO:     127.0.0.1:41230 - "GET %s HTTP/1.1" %s'


@pytest.mark.parametrize(
    ("path", "status", "folds"),
    [
        ("/health", "200 OK", True), ("/model_info", "200 OK", True), ("/v1/loads", "404 Not Found", True), ("/metrics", "200 OK", True),
        ("/get_server_info", "200 OK", True), ("/health", "503 Service Unavailable", False), ("/v1/files", "200 OK", False), ("/healthy", "200 OK", False),
    ],
)  # fmt: skip
def test_only_usual_answers_to_polls_fold(path, status, folds):
    assert is_poll(POLL % (path, status)) is folds


def test_a_request_is_no_poll():
    assert not is_poll('[2026-11-29 18:10:00] INFO:     127.0.0.1:41230 - "POST /health HTTP/1.1" 200 OK')


class Pane(App[None]):
    CSS = "LogView { width: 100%; height: 100%; }"

    def __init__(self, path) -> None:
        super().__init__()
        self._path = path
        self.palette = Palette(self.current_theme)

    def compose(self) -> ComposeResult:
        yield LogView()


async def test_polls_fold_at_the_end_and_come_back(tmp_path):
    path = tmp_path / "server.log"
    poll = POLL % ("/v1/loads", "200 OK")
    path.write_text(
        "".join(f"[2026-11-29 18:10:00 TP0] Decode batch, #{n}\n" + f"{poll}\n" * 5 for n in range(60))
    )
    app = Pane(path)
    async with app.run_test(size=(120, 20)) as pilot:
        view = app.query_one(LogView)
        port = LogFile(path)
        view.open(port)
        view.focus()
        while not port.is_complete():
            await asyncio.sleep(0.01)

        def shown() -> list[str]:
            view.poll()
            return ["".join(seg.text for seg in row.line) for row in view.picture.rows]

        rows = shown()
        assert len(rows) == view.inner[1] and all("Decode batch" in row for row in rows) and "#59" in rows[-1]
        assert any("polls folded" in seg.text for seg in view.picture.note)
        await pilot.press("o")
        assert sum("GET /v1/loads" in row for row in shown()) > len(rows) // 2
        await pilot.press("o", "up")  # not at the end any more: every line is shown in its place
        assert any("GET /v1/loads" in row for row in shown())
