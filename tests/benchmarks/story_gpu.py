"""The whole story on a real SGLang: a target is trained, served, its states captured, a draft trained, served, and both are measured.

    python3 tests/benchmarks/story_gpu.py --out OUT --sglang PYTHON [--parts target,pipeline,report,ranks,specforge] [--toy] [--seconds 120]

Parts, each kept in OUT and left out when it is there already (delete OUT/PART.done to make it again):
  target     a Llama-type model of about 140 M parameters, trained on the Python sources of this machine (no network); needs a GPU
  pipeline   `k2tui pipeline run` with a real SGLang: serve, prepare, benchmark, extract through the plug-in, train, serve the untrained and
             the trained draft with EAGLE3 (3-1-4), benchmark both on held-out prompts
  report     the pipeline's report, and the dashboard's picture of it, into OUT
  ranks      the trainer on one GPU, two with plain data parallel, two with FSDP2: the same losses, and the speeds (needs two GPUs)
  specforge  SpecForge's other settings and its draft's held-out accuracy, beside ours (needs --wheels; see eagle3_gpu.py)

--sglang: the Python of an environment with SGLang 0.5.23. Any further settings of its profile: --arg=FLAG and --env KEY=VALUE (may repeat).
--toy: the same on a CPU with the model that k2tui ships, to see that every part runs: accept lengths mean something there, speeds do not.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "assets" / "tiny-target" / "train"
CPU_ARGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--disable-overlap-schedule", "--max-total-tokens", "8192",
)  # fmt: skip
CPU_ENV = {
    "STUB_ROOTS": "torchvision,soundfile,triton",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def say(text: str) -> None:
    print(text, flush=True)


def run(argv: list[str], out: Path, name: str, **env: str) -> None:
    """A command with its log in OUT; raises when it fails, showing the log's end."""
    log = out / f"{name}.log"
    with log.open("a") as fh:
        done = subprocess.run(
            argv, stdout=fh, stderr=subprocess.STDOUT, env={**os.environ, **env}, check=False
        )
    if done.returncode:
        say(log.read_text(errors="replace")[-3000:])
        raise SystemExit(f"{name}: exit code {done.returncode}; the whole log: {log}")


def k2(args: argparse.Namespace, *argv: str, name: str) -> None:
    env = {
        "K2TUI_HOME": str(args.out / "home"),
        "K2TUI_CONFIG": str(args.out / "k2tui.toml"),
        "PYTHONPATH": str(ROOT),
    }
    run([sys.executable, "-m", "k2tui", *argv], args.out, name, **env)


# ---- parts


def part_target(args: argparse.Namespace) -> None:
    out: Path = args.out
    if args.toy:
        (out / "target.path").write_text("asset:tiny-target")
        return
    import sysconfig

    corpus = out / "corpus.jsonl.xz"
    paths = sysconfig.get_paths()
    also = [a for p in dict.fromkeys((paths["purelib"], paths["platlib"])) for a in ("--also", p)]
    if not corpus.exists():
        run([sys.executable, str(TRAIN / "corpus.py"), f"{corpus}.part", *also], out, "target")
        os.replace(f"{corpus}.part", corpus)
    if not (out / "tokenizer" / "tokenizer.json").exists():
        argv = [sys.executable, str(TRAIN / "tokenizer.py"), str(corpus), str(out / "tokenizer"), "--vocab-size", "8192"]  # fmt: skip
        run(argv, out, "target")
    # Deep and narrow: a decoding step of so small a model costs its kernels' starts, layer by layer, and the draft has one layer.
    run(
        [
            sys.executable, str(TRAIN / "train.py"), str(corpus), str(out / "tokenizer"), str(out / "target"), "--seconds", str(args.seconds),
            "--hidden", str(args.hidden), "--layers", str(args.layers), "--rows", "32", "--lr", "1.5e-3",
        ],
        out, "target", **OFFLINE,
    )  # fmt: skip
    (out / "target.path").write_text(str(out / "target"))


def prompts_of(args: argparse.Namespace, count: int) -> list[str]:
    """Questions that the target has seen the like of: the first turns of its own training dialogues, in a fixed order."""
    if args.toy:
        lines = (ROOT / "assets" / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines[:count]]
    found: list[str] = []
    with lzma.open(args.out / "corpus.jsonl.xz", "rt", encoding="utf-8") as fh:
        for line in fh:
            row = json.loads(line)
            if "turns" in row:
                found.append(row["turns"][0][0])
    found = list(dict.fromkeys(found))
    random.Random(0).shuffle(found)
    return found[:count]


def part_pipeline(args: argparse.Namespace) -> None:
    out: Path = args.out
    target = (out / "target.path").read_text()
    prompts = prompts_of(args, 120 if args.toy else args.prompts)
    (out / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8"
    )
    env = {**OFFLINE, **(CPU_ENV if args.toy else {}), **dict(pair.split("=", 1) for pair in args.env)}
    engine_args = [
        *(CPU_ARGS if args.toy else ("--mem-fraction-static", "0.5")),
        "--enable-metrics",
        *args.arg,
    ]
    lines = [
        'default_profile = "story"', "[profile.story]", 'engine = "sglang"', f"python = {json.dumps(str(args.sglang))}", f"model = {json.dumps(target)}",
        'served_model_name = "story-target"', f"port = {args.port}", f"args = {json.dumps(engine_args)}", "speculative_num_steps = 3",
        "speculative_eagle_topk = 1", "speculative_num_draft_tokens = 4", "[profile.story.env]", *(f"{k} = {json.dumps(v)}" for k, v in env.items()),
    ]  # fmt: skip
    (out / "k2tui.toml").write_text("\n".join(lines) + "\n")
    text = (ROOT / "assets" / "demo" / "pipeline.toml").read_text(encoding="utf-8")
    for old, new in (
        ('name = "demo"', 'name = "story"'),
        ('profile = "tiny"', 'profile = "story"'),
        (', args = ["--load-delay-s", "0.06"] }', " }"),
        ("{assets}/demo/prompts.jsonl", str(out / "prompts.jsonl")),
        ('"result.rows.0.accept_length > 1.3"', '"result.rows.0.accept_length > 1"'),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (out / "pipeline.toml").write_text(text)
    settings: dict[str, object]
    if args.toy:
        settings = {"prepare.concurrency": 4, "prepare.max_new_tokens": 32, "bench.num_prompts": 8, "bench-draft.num_prompts": 8, "bench-untrained.num_prompts": 4,
                    "bench.concurrency": "[1]", "bench-draft.concurrency": "[1]", "bench.output_len": 32, "bench-draft.output_len": 32, "bench-untrained.output_len": 32,
                    "train.epochs": 6}  # fmt: skip
    else:
        settings = {"prepare.concurrency": 64, "prepare.max_new_tokens": 160, "bench.num_prompts": 48, "bench-draft.num_prompts": 48, "bench-untrained.num_prompts": 16,
                    "bench.concurrency": "[1,8,32]", "bench-draft.concurrency": "[1,8,32]", "bench.output_len": 160, "bench-draft.output_len": 160,
                    "bench-untrained.output_len": 160, "train.epochs": 10, "train.lr": 1.5e-3, "train.ttt_length": 5, "train.batch_size": 32,
                    "train.eval_every": 200}  # fmt: skip
    argv = ["pipeline", "run", "--here", "--file", str(out / "pipeline.toml")]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    (out / "settings.json").write_text(json.dumps(settings))
    k2(args, *argv, name="pipeline")


def part_report(args: argparse.Namespace) -> None:
    folder = args.out / "home" / "chains" / "story"
    for name in ("report.md", "report.json"):
        (args.out / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    outcome = json.loads((folder / "report.json").read_text(encoding="utf-8"))["outcome"]
    say((folder / "report.md").read_text(encoding="utf-8"))
    length, speed = outcome["accept_length"] or 0.0, outcome["speedup"] or 0.0
    say(
        f"goal of accept length 2.0 at 3-1-4: {'met' if length >= 2 else 'not met'} ({length:.3f}; untrained {outcome['untrained_accept_length']:.3f})"
    )
    if not args.toy:
        say(f"goal of 1.2 times the single-stream speed: {'met' if speed > 1.2 else 'not met'} ({speed:.3f})")


def eagle3_gpu(args: argparse.Namespace, parts: str, name: str) -> None:
    wheels = ["--wheels", str(args.wheels)] if args.wheels else []
    tiny = ["--tiny"] if args.toy else []
    run(
        [sys.executable, str(ROOT / "tests" / "benchmarks" / "eagle3_gpu.py"), "--out", str(args.out / name), "--root", str(args.out / "eagle3-data"), "--parts", parts, *wheels, *tiny],
        args.out, name,
    )  # fmt: skip


def part_ranks(args: argparse.Namespace) -> None:
    eagle3_gpu(args, "data:8b,cli1:8b,cli2:8b,clishard:8b", "ranks")


def part_specforge(args: argparse.Namespace) -> None:
    if not args.wheels and not args.toy:
        raise SystemExit("specforge: give --wheels, a folder with SpecForge's wheel and what it imports")
    eagle3_gpu(args, "data:8b,train:8b,sf:8b,sfacc:8b,sfcompact:8b,sfsmall:8b", "specforge")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "target": part_target, "pipeline": part_pipeline, "report": part_report, "ranks": part_ranks, "specforge": part_specforge,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--sglang", type=Path, default=Path(sys.executable), help="Python of SGLang's environment"
    )
    parser.add_argument("--parts", default="target,pipeline,report,ranks")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0, help="training time of the target")
    parser.add_argument("--hidden", type=int, default=384, help="the target's width")
    parser.add_argument(
        "--layers",
        type=int,
        default=80,
        help="the target's depth: a step of a shallow one is too short for a draft to save anything",
    )
    parser.add_argument("--prompts", type=int, default=5000, help="prompts that the target answers")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--arg", action="append", default=[], help="further argument of SGLang (--arg=--flag)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="further variable of SGLang's environment",
    )
    parser.add_argument("--wheels", type=Path)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.parts.split(",")
    unknown = [p for p in wanted if p not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; parts: {', '.join(PARTS)}")
    for name in wanted:
        done = args.out / f"{name}.done"
        if done.exists():
            say(f"[{name}: done before]")
            continue
        began = time.monotonic()
        PARTS[name](args)
        done.write_text(f"{time.monotonic() - began:.1f}\n")
        say(f"[{name}: {time.monotonic() - began:.0f} s]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
