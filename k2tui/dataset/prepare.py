"""From prompts to tokenized_data.jsonl, by inference on the running server: token ids in, token ids out, nothing re-tokenised.

Laws. A row is appended whole or not at all. What was done is never done twice: a prompt counts as done when its tokens are in the
file or its outcome is in the log beside it; one that was refused is no outcome and is asked for again. The server renders the
template; a prompt that its chat API renders otherwise is refused by name. A loss mask of 1 stands only on tokens that the server
itself generated in that very context.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k2tui.capture.client import Connection
from k2tui.dataset.filters import FilterRules, reason_to_drop
from k2tui.dataset.prompts import Prompt
from k2tui.dataset.rows import Row, RowFile, hash_ids, make_row, problem_of
from k2tui.errors import K2Error, NotReadyError
from k2tui.files import write_json

THINK_END = "</think>"
REFUSED = ("refused by the server", "prompt does not match the server's rendering", "not a valid row")
_ALL_REFUSED = 20  # so many refusals and not one answer: the set-up is wrong, not the prompts


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled. seed: base; each prompt gets its own, so that the order of work does not matter."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = -1
    max_new_tokens: int = 2048
    seed: int = 1

    def params(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
        }
        return told | ({"top_k": self.top_k} if self.top_k > 0 else {})


@dataclass(frozen=True, slots=True)
class Speed:
    """done: prompts with an outcome; refused ones are not among them."""

    done: int
    total: int
    kept: int
    tokens_s: float
    eta_s: float | None
    refused: int
    waiting: str  # why nothing moves, in words


@dataclass
class Preparation:
    """One run. url: the server. rules: what is dropped. verify_every: how often the chat API's own count is asked for."""

    url: str
    out: Path
    prompts: Sequence[Prompt]
    sampling: Sampling = field(default_factory=Sampling)
    rules: FilterRules = field(default_factory=FilterRules)
    concurrency: int = 32
    verify_every: int = 1
    give_up_s: float = 900.0
    on_speed: Callable[[Speed], None] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target_rows: int | None = None  # stop when the file has so many rows
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refused: dict[str, str] = {}  # prompt's name -> why
        self.existing = 0
        self.kept = 0
        self._flying = 0
        self.new_tokens = 0
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._keys: set[str] = set()
        self._gone_since: float | None = None
        self._waiting = ""
        self._error: Exception | None = None
        self._use_seed = True
        self._think_is_a_token = False
        self.log_path = self.out.with_name(self.out.name + ".log.jsonl")
        self.settings_path = self.out.with_name(self.out.name + ".settings.json")

    def execute(self) -> None:
        """Until every prompt has its outcome. Raises K2Error: a damaged file, another model, no server for give_up_s."""
        model = self._server_facts()
        self.existing = self._open_existing()
        todo = [p for p in self.prompts if p.key() not in self._keys]
        self.outcomes["done before"] = len(self.prompts) - len(todo)
        self._note_settings(model)
        jobs: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
        for prompt in todo:
            jobs.put(prompt)
        started = time.monotonic()
        with self.out.open("ab") as data, self.log_path.open("ab") as log:
            threads = [
                threading.Thread(target=self._work, args=(jobs, data, log), daemon=True)
                for _ in range(min(self.concurrency, max(1, len(todo))))
            ]
            for thread in threads:
                thread.start()
            try:
                while any(t.is_alive() for t in threads):
                    time.sleep(0.2)
                    self._report(started, len(todo))
                    if self._error:
                        raise self._error
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join(10)
                for fh in (data, log):
                    with contextlib.suppress(OSError):
                        fh.flush()
                        os.fsync(fh.fileno())
        if self._error:
            raise self._error
        self._report(started, len(todo))

    # ---- what is there

    def _open_existing(self) -> int:
        """Rows that the file has; a cut last line is taken off, every row is checked."""
        if not self.out.exists():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.touch()
        rows = RowFile(self.out)
        if len(rows) and not rows.ends_whole:
            os.truncate(self.out, rows.offsets[-2])
            rows = RowFile(self.out)
        for number in range(len(rows)):
            row = rows.row(number)
            self._done.add(row.prompt_hash())
        if self.log_path.exists():
            raw = self.log_path.read_bytes()
            whole = raw[: raw.rfind(b"\n") + 1]
            if len(whole) != len(raw):
                os.truncate(self.log_path, len(whole))
            for line in whole.splitlines():
                told = json.loads(line)
                # a kept row counts only if it is in the file: data first, log second
                if told["outcome"] in REFUSED:
                    continue
                if told["outcome"] != "kept" or told.get("prompt_hash") in self._done:
                    self._keys.add(told["key"])
        return len(rows)

    def _server_facts(self) -> dict[str, Any]:
        conn = Connection(self.url, 20)
        try:
            told = conn.ask("GET", "/model_info")
            with contextlib.suppress(K2Error, OSError):
                told["version"] = conn.ask("GET", "/server_info").get("version")
            with contextlib.suppress(K2Error, OSError):
                answer = conn.ask("POST", "/tokenize", {"prompt": THINK_END, "add_special_tokens": False})
                self._think_is_a_token = len(_ids(answer.get("tokens"), f"{self.url}/tokenize: tokens")) == 1
            return told
        except OSError as err:
            raise NotReadyError(f"{self.url}: no answer ({err})", "start the server, or check the address")
        finally:
            conn.close()

    def _note_settings(self, model: Mapping[str, Any]) -> None:
        """The settings of this run beside those of the runs before it, with the row at which each began."""
        told: list[Any] = []
        if self.settings_path.exists():
            told = json.loads(self.settings_path.read_text(encoding="utf-8"))["runs"]
        path = str(model.get("model_path", ""))
        template = ""
        if path and Path(path).is_dir():
            from k2tui.capture.model import template_hash

            template = template_hash(Path(path))
        now = {
            "first_row": self.existing,
            "started_s": time.time(),
            "model_path": path,
            "engine_version": model.get("version"),
            "template_hash": template,
            "template_kwargs": dict(self.template_kwargs),
            "sampling": asdict(self.sampling),
            "filters": asdict(self.rules),
            "loss_mask_rule": "tokens that the server generated in this very context; earlier turns only while the template keeps them",
        }
        if told and told[-1].get("model_path") not in ("", path):
            raise K2Error(
                f"{self.out}: its rows were made with {told[-1]['model_path']}, this server runs {path}",
                "use another --out: answers of two models must not be mixed",
            )
        if told and {**told[-1], "first_row": 0, "started_s": 0} == {**now, "first_row": 0, "started_s": 0}:
            return
        write_json(self.settings_path, {"runs": [*told, now]}, mode=0o644)

    # ---- the work

    def _work(self, jobs: queue.SimpleQueue[Prompt], data: Any, log: Any) -> None:
        conn = Connection(self.url, 1800)
        while not self.stop.is_set():
            with self._lock:
                # as many in flight as rows are wanted: nothing is generated to be thrown away
                short = (
                    None
                    if self.target_rows is None
                    else self.target_rows - self.existing - self.kept - self._flying
                )
                if short is not None and short <= 0:
                    if self.target_rows is not None and self.existing + self.kept >= self.target_rows:
                        break
                    wait = True
                else:
                    wait = False
                    self._flying += 1
            if wait:
                self.stop.wait(0.05)
                continue
            try:
                prompt = jobs.get_nowait()
            except queue.Empty:
                with self._lock:
                    self._flying -= 1
                break
            try:
                self._one_until_done(conn, prompt, data, log)
            except Exception as err:
                self._error = (
                    err
                    if isinstance(err, K2Error)
                    else K2Error(f"{prompt.name}: {type(err).__name__}: {err}")
                )
                self.stop.set()
            finally:
                with self._lock:
                    self._flying -= 1
        conn.close()

    def _one_until_done(self, conn: Connection, prompt: Prompt, data: Any, log: Any) -> None:
        while not self.stop.is_set():
            try:
                row, outcome, prompt_hash = self._one(conn, prompt)
            except OSError as err:
                self._server_away(str(err))
                continue
            except _OtherRendering as err:
                row, outcome, prompt_hash = None, REFUSED[1], ""
                self.refused[prompt.name] = err.message
            except K2Error as err:
                if any(f"HTTP {code}" in err.message for code in (500, 502, 503)):
                    self._server_away(err.message)
                    continue
                row, outcome, prompt_hash = None, REFUSED[0], ""
                self.refused[prompt.name] = err.message
            self._gone_since, self._waiting = None, ""
            with self._lock:
                if row is not None:
                    if prompt_hash in self._done:
                        row, outcome = None, "duplicate prompt"
                    else:
                        self._done.add(prompt_hash)
                if row is not None:
                    data.write(row.to_line().encode())
                    data.flush()
                    self.kept += 1
                    self.new_tokens += row.n_response_tokens
                self.outcomes[outcome] += 1
                told = {
                    "key": prompt.key(),
                    "outcome": outcome,
                    "name": prompt.name,
                    "source": prompt.source,
                    "prompt_hash": prompt_hash,
                }
                if prompt.name in self.refused:
                    told["why"] = self.refused[prompt.name][:300]
                log.write((json.dumps(told) + "\n").encode())
                log.flush()
            if self.refused_count >= _ALL_REFUSED and set(self.outcomes) <= {"done before", *REFUSED}:
                raise K2Error(
                    f"the first {self.refused_count} prompts were all refused; {prompt.name}: {self.refused[prompt.name]}",
                    "nothing was generated; look at the server's chat template and version",
                )
            return

    @property
    def refused_count(self) -> int:
        """Prompts refused in this run; they are asked for again by the next."""
        return sum(self.outcomes[reason] for reason in REFUSED)

    def _server_away(self, why: str) -> None:
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        self._waiting = f"the server does not answer ({why[:100]}): waiting"
        if now - self._gone_since > self.give_up_s:
            raise NotReadyError(
                f"{self.url}: {why}",
                "start the server and run the same command again: it goes on where it was",
            )
        self.stop.wait(1.0)

    def _one(self, conn: Connection, prompt: Prompt) -> tuple[Row | None, str, str]:
        """(row or None, outcome in words, hash of the prompt's tokens)."""
        tools = list(prompt.tools)
        users = [i for i, m in enumerate(prompt.messages) if m["role"] in ("user", "tool")]
        messages: list[dict[str, Any]] = []
        so_far: list[int] = []
        mask: list[int] = []
        reasoning = False
        reply: dict[str, Any] = {}
        rendered: list[int] = []
        out: list[int] = []
        for number, message in enumerate(prompt.messages):
            if message["role"] == "assistant" and number not in (0,):
                continue  # answered anew
            messages.append(dict(message))
            following = (
                prompt.messages[number + 1]["role"] if number + 1 < len(prompt.messages) else "assistant"
            )
            if number not in users or following in ("user", "tool"):
                continue
            rendered = self._render(conn, messages, tools)
            if number == users[0]:
                if hash_ids(rendered) in self._done and number == users[-1]:
                    return None, "duplicate prompt", hash_ids(rendered)
                self._verify(conn, messages, tools, rendered, prompt)
            if len(rendered) + 1 >= self.rules.max_seq_len:
                return None, "prompt too long", hash_ids(rendered)
            # what was generated before keeps its mask only where the template left it in place
            keep = so_far and rendered[: len(so_far)] == so_far
            mask = (mask if keep else [0] * min(len(so_far), len(rendered))) + [0] * len(rendered)
            mask = mask[: len(rendered)]
            reply = self._generate(conn, rendered, prompt)
            out = list(reply["output_ids"])
            so_far = rendered + out
            mask = mask + [1] * len(out)
            text = str(reply.get("text", ""))
            think, found, answer = text.rpartition(THINK_END)
            reasoning = bool(found)
            said: dict[str, Any] = {"role": "assistant", "content": answer.strip() if found else text}
            if found:
                said["reasoning_content"] = think.replace("<think>", "").strip()
            messages.append(said)
            if number != users[-1]:
                drop = reason_to_drop(self.rules, len(so_far), out, text, _finish(reply))
                if drop:
                    return None, drop, hash_ids(rendered)
        finish = _finish(reply)
        prompt_hash = hash_ids(rendered)
        drop = reason_to_drop(self.rules, len(so_far), out, str(reply.get("text", "")), finish)
        if drop:
            return None, drop, prompt_hash
        again = self._render(conn, messages[:-1], tools)
        if again != rendered:
            self.refused[prompt.name] = "the template renders this conversation differently each time"
            return None, REFUSED[1], prompt_hash
        row = make_row(so_far, mask, len(rendered), reasoning, finish)
        problem = problem_of({k: getattr(row, k) for k in row.__dataclass_fields__})
        if problem:
            self.refused[prompt.name] = problem
            return None, REFUSED[2], prompt_hash
        return row, "kept", prompt_hash

    def _render(
        self, conn: Connection, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> list[int]:
        body: dict[str, Any] = {"messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if self.template_kwargs:
            body["chat_template_kwargs"] = dict(self.template_kwargs)
        told = conn.ask("POST", "/tokenize", body)
        tokens = told.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise K2Error(
                f"{self.url}/tokenize: gave no tokens for messages",
                "this server is too old: SGLang 0.5.12 or newer can",
            )
        return _ids(tokens[0] if isinstance(tokens[0], list) else tokens, f"{self.url}/tokenize: tokens")

    def _verify(
        self,
        conn: Connection,
        messages: Sequence[Any],
        tools: Sequence[Any],
        rendered: Sequence[int],
        prompt: Prompt,
    ) -> None:
        """The chat API must see the same prompt: its token ids where the server tells them, else their number."""
        if not self.verify_every or int(prompt.key(), 16) % self.verify_every:
            return
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": 1,
            "temperature": 0,
            "return_prompt_token_ids": True,
        }
        if tools:
            body["tools"] = list(tools)
        if self.template_kwargs:
            body["chat_template_kwargs"] = dict(self.template_kwargs)
        answer = conn.ask("POST", "/v1/chat/completions", body)
        where = f"{self.url}/v1/chat/completions"
        choices = answer.get("choices") or [{}]
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise K2Error(f"{where}: choices is no list of objects")
        told_ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
        ids = None if told_ids is None else _ids(told_ids, f"{where}: prompt_token_ids")
        if ids is not None and ids != list(rendered):
            at = next((i for i, (a, b) in enumerate(zip(ids, rendered, strict=False)) if a != b), -1)
            where = f"token {at}" if at >= 0 else "its end"
            raise _OtherRendering(
                f"{prompt.name}: the chat API renders another prompt from {where} on ({len(ids)} tokens there, {len(rendered)} here)"
            )
        usage = answer.get("usage") or {}
        told = usage.get("prompt_tokens") if isinstance(usage, dict) else usage
        if told is not None and type(told) is not int:
            raise K2Error(f"{where}: usage tells no number of prompt_tokens")
        if told is not None and told != len(rendered):
            raise _OtherRendering(
                f"{prompt.name}: {len(rendered)} tokens were rendered, the chat API counts {told}: not the server's own rendering"
            )

    def _generate(self, conn: Connection, ids: Sequence[int], prompt: Prompt) -> dict[str, Any]:
        params = self.sampling.params()
        room = self.rules.max_seq_len - len(ids)
        params["max_new_tokens"] = max(1, min(params["max_new_tokens"], room))
        if self._think_is_a_token:
            params["skip_special_tokens"] = (
                False  # some tokenizers call it special: the text would not show where thinking ends
            )
        if self._use_seed:
            params["sampling_seed"] = (int(prompt.key(), 16) ^ self.sampling.seed) & 0x7FFFFFFF
        try:
            reply = conn.ask("POST", "/generate", {"input_ids": list(ids), "sampling_params": params})
        except K2Error as err:
            if "sampling_seed" not in err.message:
                raise
            self._use_seed = False  # an older server: no seed a request
            return self._generate(conn, ids, prompt)
        if not isinstance(reply.get("output_ids"), list):
            raise K2Error(
                f"{self.url}/generate: no output_ids in the answer",
                "this server is too old: SGLang 0.4.6 or newer can",
            )
        return {**reply, "output_ids": _ids(reply["output_ids"], f"{self.url}/generate: output_ids")}

    def _report(self, started: float, total: int) -> None:
        if not self.on_speed:
            return
        done = sum(self.outcomes.values()) - self.outcomes["done before"] - self.refused_count
        took = time.monotonic() - started
        rate = done / took if took > 0 else 0.0
        if self.target_rows is not None:
            total = min(total, done + max(0, self.target_rows - self.existing - self.kept))
        eta = max(0, total - done - self.refused_count) / rate if rate > 0 else None
        self.on_speed(
            Speed(
                done,
                total,
                self.kept,
                self.new_tokens / took if took else 0.0,
                eta,
                self.refused_count,
                self._waiting,
            )
        )


class _OtherRendering(K2Error):
    """The server's chat API sees another prompt than the one that would be learned from."""


def _ids(value: Any, where: str) -> list[int]:
    """Token ids that a server told. Raises K2Error when they are none."""
    if not isinstance(value, list) or any(type(t) is not int or not 0 <= t < 1 << 31 for t in value):
        raise K2Error(f"{where} is no list of token ids")
    return value


def _finish(reply: Mapping[str, Any]) -> str | None:
    meta = reply.get("meta_info")
    told = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(told, Mapping):
        told = told.get("type")
    return str(told) if told is not None else None
