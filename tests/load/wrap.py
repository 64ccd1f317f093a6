"""What containers, clusters, terminals and log viewers do to a log: each style turns the bytes of a plain log into its own.

A test tool: `python tests/load/wrap.py STYLE < plain.log > wrapped.log` does the same by hand.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Style = Callable[[bytes], bytes]
_STAMP = re.compile(rb"\[(20\d\d-\d\d-\d\d) (\d\d:\d\d:\d\d)[^\]]*\]")
_OWN = re.compile(rb"\[(?:20\d\d-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)?((?: [A-Z_]+\d+)*)\] ?")


def _lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _times(lines: list[bytes]) -> list[datetime]:
    """A wall clock for every line: its own stamp in UTC+8's neighbour zone, else a little after the line before."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    out: list[datetime] = []
    for line in lines:
        match = _STAMP.search(line)
        if match:
            own = datetime.fromisoformat(f"{match[1].decode()}T{match[2].decode()}+00:00")
            now = max(now, own) if abs((own - now).total_seconds()) < 1e5 else own
        now += timedelta(milliseconds=1)
        out.append(now)
    return out


def _stamped(form: Callable[[datetime, bytes], bytes]) -> Style:
    def style(data: bytes) -> bytes:
        lines = _lines(data)
        return b"\n".join(form(t, line) for t, line in zip(_times(lines), lines, strict=True)) + b"\n"

    return style


def _prefix(prefix: bytes) -> Style:
    return lambda data: b"".join(prefix + line + b"\n" for line in _lines(data))


def _iso(t: datetime, digits: int = 9) -> bytes:
    return (t.strftime("%Y-%m-%dT%H:%M:%S.") + f"{t.microsecond:06d}123"[:digits]).encode()


def _cri(data: bytes) -> bytes:
    """The container runtime cuts long lines anywhere: flag P until the last part, F."""
    chance = random.Random(len(data))
    out: list[bytes] = []
    lines = _lines(data)
    for t, line in zip(_times(lines), lines, strict=True):
        stamp = _iso(t, chance.choice((7, 8, 9))) + b"+08:00"
        while len(line) > 40 and chance.random() < 0.5:
            cut = chance.randrange(1, len(line))
            out.append(stamp + b" stderr P " + line[:cut])
            line = line[cut:]
        out.append(stamp + b" stderr F " + line)
    return b"\n".join(out) + b"\n"


_OTHER = [
    b"[2026-11-29 10:00:00] server_args=ServerArgs(model_path='/models/other', tp_size=1, port=30001)",
    b"[2026-11-29 10:00:09] Init torch distributed begin.",
    b"[2026-11-29 10:00:09] Init torch distributed ends. mem usage=0.00 GB",
    b"[2026-11-29 10:00:10] Load weight begin. avail mem=78.41 GB",
    b"Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]",
    b"Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.52it/s]",
    b"Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.86it/s]",
    b"[2026-11-29 10:00:14] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=63.02 GB, mem usage=15.39 GB.",
    b"[2026-11-29 10:00:15] Memory pool end. avail mem=7.90 GB",
    b"[2026-11-29 10:00:20] The server is fired up and ready to roll!",
]


def _two_engines(data: bytes) -> bytes:
    """docker compose shows two servers in one stream; the other one is well."""
    out: list[bytes] = []
    others = list(_OTHER)
    lines = _lines(data)
    for number, line in enumerate(lines):
        out.append(b"sglang-main-1   | " + line)
        if others and number % max(1, len(lines) // len(_OTHER)) == 0:
            out.append(b"sglang-other-1  | " + others.pop(0))
    out += [b"sglang-other-1  | " + line for line in others]
    return b"\n".join(out) + b"\n"


def _ansi(data: bytes) -> bytes:
    out: list[bytes] = []
    for n, line in enumerate(_lines(data)):
        colour = (b"\x1b[1;33m", b"\x1b[36m", b"\x1b[0;38;5;208m", b"\x1b[2K\x1b[1G")[n % 4]
        half = len(line) // 2
        while half and 0x80 <= line[half] < 0xC0:
            half -= 1
        out.append(colour + line[:half] + b"\x1b[0m" + line[half:] + b"\x1b[K")
    return b"\n".join(out) + b"\n"


def _no_stamps(data: bytes) -> bytes:
    return b"".join(_OWN.sub(b"", line) + b"\n" for line in _lines(data))


def _ranks_only(data: bytes) -> bytes:
    def keep(match: re.Match[bytes]) -> bytes:
        rank = match[1].strip()
        return b"[" + rank + b"] " if rank else b""

    return b"".join(_OWN.sub(keep, line) + b"\n" for line in _lines(data))


_FOREIGN = [
    "信息：正在加载模型权重，请稍候……",
    "警告：未找到配置，使用默认值",
    "情報: トークナイザーを読み込み中です（エラーなし）",
    "Hinweis: Die Verbindung wurde hergestellt, 0 Fehler",
    "Предупреждение: используется значение по умолчанию",
    "معلومة: بدأ التحميل",
]


def _foreign(data: bytes) -> bytes:
    out: list[bytes] = []
    for n, line in enumerate(_lines(data)):
        if n % 2 == 0:
            out.append(_FOREIGN[n // 2 % len(_FOREIGN)].encode())
        out.append(line)
    return b"\n".join(out) + b"\n"


_WALL = b"self.cur_batch.reqs=[Req(rid=0, input_ids=[" + b"128000, 9125, " * 80_000 + b"])]"


def _mega(data: bytes) -> bytes:
    wall = _WALL
    lines = _lines(data)
    middle = len(lines) // 2
    return b"\n".join([wall, *lines[:middle], wall, *lines[middle:]]) + b"\n"


def _torn(data: bytes) -> bytes:
    """Bars have no newline of their own, so another rank's line begins right behind them; a refresh begins with CR."""
    out = b""
    for line in _lines(data):
        if b"% Completed |" in line or b"it/s]" in line or b"s/it]" in line:
            out += b"\r" + line
        elif _STAMP.match(line):
            out += line + b"\n"
        else:
            out += (b"\n" if out and not out.endswith(b"\n") else b"") + line + b"\n"
    return out + (b"" if out.endswith(b"\n") else b"\n")


def _json_file(data: bytes) -> bytes:
    lines = _lines(data)
    return b"".join(
        json.dumps(
            {
                "log": line.decode("utf-8", "replace") + "\n",
                "stream": "stderr",
                "time": _iso(t).decode() + "Z",
            }
        ).encode()
        + b"\n"
        for t, line in zip(_times(lines), lines, strict=True)
    )


_OLD_START = b"""[2024-01-01 00:00:01] server_args=ServerArgs(model_path='/models/old', tp_size=1, host='127.0.0.1', port=30000)
[2024-01-01 00:00:05] Init torch distributed begin.
[2024-01-01 00:00:06] Load weight begin. avail mem=78.41 GB
Loading safetensors checkpoint shards:  25% Completed | 5/20 [00:11<00:33,  2.2s/it]
[2024-01-01 00:00:30] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/model_executor/model_runner.py", line 379, in load_model
safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge
[2024-01-01 00:00:31] Received sigquit from a child process. It usually means the child failed.
"""


def _restarted(data: bytes) -> bytes:
    """An earlier start of a supervised server failed for another reason; the newest start counts."""
    if b"server_args=" in data or b"vLLM API server version" in data:
        return _OLD_START + data
    return (
        _OLD_START
        + b"[2024-01-01 00:01:00] server_args=ServerArgs(model_path='/models/m', host='127.0.0.1', port=30000)\n"
        + data
    )


def _noise(data: bytes) -> bytes:
    out: list[bytes] = []
    for n, line in enumerate(_lines(data)):
        if n % 3 == 0:
            out.append(
                b"[2024-01-01 00:00:00] Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchaudio'"
            )
            out.append(
                b"/usr/lib/python3/dist-packages/x/y.py:12: UserWarning: deprecated, error=None, timeout=300"
            )
        out.append(line)
    return b"\n".join(out) + b"\n"


STYLES: dict[str, Style] = {
    "docker": _stamped(lambda t, line: _iso(t) + b"Z " + line),
    "docker_compose": _prefix(b"sglang-1  | "),
    "two_engines": _two_engines,
    "kubernetes_cri": _cri,
    "kubectl_prefix": _stamped(lambda t, line: b"[pod/llm-0/server] " + _iso(t) + b"Z " + line),
    "journald": _stamped(
        lambda t, line: t.strftime("%b %d %H:%M:%S").encode() + b" gpu-7 sglang[4321]: " + line
    ),
    "journald_iso": _stamped(
        lambda t, line: t.strftime("%Y-%m-%dT%H:%M:%S+0000").encode() + b" gpu-7 python3[4321]: " + line
    ),
    "ray": _prefix(b"\x1b[36m(SGLangEngine pid=3111, ip=10.0.0.7)\x1b[0m "),
    "job": _stamped(
        lambda t, line: b"[" + t.strftime("%Y-%m-%dT%H:%M:%S+08:00").encode() + b"] job-llm-abcde >> " + line
    ),
    "slurm": _prefix(b"3: "),
    "ansi": _ansi,
    "crlf": lambda data: b"".join(line + b"\r\n" for line in _lines(data)),
    "no_stamps": _no_stamps,
    "ranks_only": _ranks_only,
    "newest_first": lambda data: b"\n".join(reversed(_lines(data))) + b"\n",
    "docker_newest_first": lambda data: b"\n".join(reversed(_lines(STYLES["docker"](data)))) + b"\n",
    "non_english": _foreign,
    "megabyte_lines": _mega,
    "torn_bars": _torn,
    "docker_json": _json_file,
    "restarted": _restarted,
    "noise": _noise,
}


if __name__ == "__main__":
    sys.stdout.buffer.write(STYLES[sys.argv[1]](sys.stdin.buffer.read()))
