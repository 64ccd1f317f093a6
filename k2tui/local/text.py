"""Text to tokens and back: a checkpoint's tokenizer.json, its chat template, and decoding token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from k2tui.errors import K2Error
from k2tui.local.checkpoint import read_json


def _token_text(value: Any) -> str:
    """tokenizer_config.json writes a special token as a text or as {"content": text, ...}."""
    return str(value.get("content", "")) if isinstance(value, Mapping) else str(value or "")


class Tokenizer:
    """A checkpoint's tokenizer. vocab_size: ids are 0 .. vocab_size - 1. chat_template: Jinja text, "" = none."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise K2Error(
                f"{folder} has no tokenizer.json",
                "the embedded engine reads the `tokenizers` format only; give --tokenizer-path",
            )
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as err:  # the library raises plain Exception
            raise K2Error(
                f"{file}: not a tokenizer that the `tokenizers` library can read: {str(err)[:160]}",
                "copy or download the file again",
            )
        self.folder = folder
        config = (
            read_json(folder / "tokenizer_config.json")
            if (folder / "tokenizer_config.json").is_file()
            else {}
        )
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.vocab_size = self._fast.get_vocab_size()
        template = config.get("chat_template") or ""
        if isinstance(template, list):  # several named templates
            template = next((t.get("template", "") for t in template if t.get("name") == "default"), "")
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            template = jinja.read_text(encoding="utf-8")
        self.chat_template = str(template)
        self._compiled: Any = None

    def token_id(self, token: str) -> int | None:
        return self._fast.token_to_id(token) if token else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The ids of a conversation with the assistant's turn opened. Raises ValueError for what the template refuses."""
        if not self.chat_template:
            raise ValueError("this model has no chat template: use /v1/completions or /generate")
        if self._compiled is None:
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            def refuse(message: str) -> None:
                raise ValueError(message)

            env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            env.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
            env.globals["raise_exception"] = refuse
            self._compiled = env.from_string(self.chat_template)
        try:
            text = self._compiled.render(
                **{"add_generation_prompt": True, **(extra or {})},
                messages=list(messages),
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except ValueError:
            raise
        except Exception as err:
            raise ValueError(f"the chat template refused these messages: {str(err)[:200]}")
        return self.encode(text, add_special_tokens=False)


class TextStream:
    """Turns a growing list of token ids into text, and finds stop strings.

    `ready` is text that may be shown: complete UTF-8, and no beginning of a stop string that is still undecided.
    """

    __slots__ = ("_at", "_prefix", "_skip", "_stop", "_tokenizer", "ready", "stopped_by", "text")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip = skip_special_tokens
        self._prefix = 0  # decoding starts here, so that a token joins its left neighbour as it should
        self._at = 0  # ids before this are already in `text`
        self.text = ""
        self.ready = ""
        self.stopped_by: str | None = None

    def push(self, ids: Sequence[int], *, last: bool = False) -> None:
        """ids: all output tokens so far. last: nothing more will come."""
        decode = self._tokenizer.decode
        before = (
            decode(ids[self._prefix : self._at], skip_special_tokens=self._skip)
            if self._at > self._prefix
            else ""
        )
        whole = decode(ids[self._prefix :], skip_special_tokens=self._skip)
        if last or (len(whole) > len(before) and not whole.endswith("\ufffd")):
            old = len(self.text)
            self.text += whole[len(before) :]
            self._prefix, self._at = self._at, len(ids)
            for stop in self._stop:
                found = self.text.find(stop, max(0, old - len(stop)))
                if found >= 0:
                    self.text = self.text[:found]
                    self.stopped_by = stop
                    break
        keep = 0
        if not last and self.stopped_by is None:
            for stop in self._stop:
                for size in range(min(len(stop) - 1, len(self.text)), keep, -1):
                    if self.text.endswith(stop[:size]):
                        keep = size
                        break
        self.ready = self.text[: len(self.text) - keep] if keep else self.text
