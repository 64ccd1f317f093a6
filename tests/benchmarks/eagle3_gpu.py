"""Speed, memory and accuracy of the EAGLE-3 trainer on one GPU, side by side with SpecForge 0.2.0 on the same files.

    python3 tests/benchmarks/eagle3_gpu.py --out OUT [--wheels DIR] [--parts data:8b,train:8b,...] [--tiny] [--deadline 560]

Makes synthetic states (a target whose next token is learnable from its states), writes them as SpecForge's .ckpt files, then runs
every part in a process of its own: a crash or a full memory costs one row. --wheels: folder with the wheels of specforge and what
it needs; without it, or without specforge, its rows are missing. --tiny: a shape for a CPU, to see that the script runs.
MFU: floating-point operations of the matrix products that really ran, over 989 TFLOP/s (an H200's dense bf16 rate).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PEAK = 989e12
RATE = 5e-4  # high, so that a few steps show whether both learn the same

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "draft_vocab_size": 32000},
    "k2": {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128, "vocab_size": 163840, "draft_vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "draft_vocab_size": 400},
}  # fmt: skip


def say(text: str) -> None:
    print(text, flush=True)


class Plan:
    """Sizes of one comparison. samples of `length` tokens; the prompt takes a quarter to three quarters of each."""

    def __init__(self, name: str, tiny: bool) -> None:
        self.name = name
        self.shape = SHAPES["tiny" if tiny else name]
        self.tiny = tiny
        big = name == "k2"
        self.length = 64 if tiny else 2048
        self.train = 32 if tiny else (48 if big else 192)
        self.held = 8 if tiny else 16
        self.batch = 4 if tiny or big else 8
        self.epochs = 1
        self.ttt = 7

    def folder(self, root: Path) -> Path:
        return root / self.name


def device():  # type: ignore[no-untyped-def]
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_data(plan: Plan, root: Path) -> None:
    """Target folder (embedding and head), .ckpt files, the vocabulary map and the draft that both trainers start from."""
    import torch
    from safetensors.torch import save_file

    from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
    from k2tui.eagle3.export import export_draft

    torch.manual_seed(0)
    dev, folder = device(), plan.folder(root)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "target").mkdir(parents=True)
    vocab, hidden, small = plan.shape["vocab_size"], plan.shape["hidden_size"], plan.shape["draft_vocab_size"]
    head = (torch.randn(vocab, hidden, device=dev) / math.sqrt(hidden)).bfloat16()
    embed = torch.randn(vocab, hidden, device=dev).mul_(0.02).bfloat16()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **{k: v for k, v in plan.shape.items() if k != "draft_vocab_size"},
        "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "target" / "config.json").write_text(json.dumps(config))
    save_file(
        {"lm_head.weight": head.cpu()},
        str(folder / "target" / "model-00001-of-00002.safetensors"),
        metadata={"format": "pt"},
    )
    save_file(
        {"model.embed_tokens.weight": embed.cpu(), "model.norm.weight": torch.ones(hidden).bfloat16()},
        str(folder / "target" / "model-00002-of-00002.safetensors"),
        metadata={"format": "pt"},
    )
    where = {
        "lm_head.weight": "model-00001-of-00002.safetensors",
        "model.embed_tokens.weight": "model-00002-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "target" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )

    ids = torch.randperm(vocab)[:small].sort().values
    used = ids[torch.randperm(small)[: max(64, small // 16)]]
    following = used[torch.randperm(len(used))]
    table = torch.zeros(vocab, dtype=torch.int64)
    table[used] = following
    follow = table.tolist()
    for kind, count in (("hs", plan.train), ("hs_eval", plan.held)):
        (folder / kind / "rows_0-2000").mkdir(parents=True)
        for i in range(count):
            fresh = used[torch.randint(len(used), (plan.length,))].tolist()
            jump = (torch.rand(plan.length) < 0.15).tolist()
            tokens = [fresh[0]]
            for t in range(1, plan.length):
                tokens.append(fresh[t] if jump[t] else follow[tokens[-1]])
            x = torch.tensor(tokens)
            one, two, three = table[x], table[table[x]], table[table[table[x]]]
            noise = lambda n: torch.randn(plan.length, hidden, device=dev) * n  # noqa: E731
            rows = lambda w, j: w[j.to(dev)].float()  # noqa: E731
            unit = math.sqrt(hidden)
            aux = torch.cat(
                (
                    rows(head, one) * unit + noise(0.5),
                    rows(head, two) * unit + noise(0.5),
                    rows(head, three) * unit + noise(0.5),
                ),
                1,
            )
            last = 14.0 * rows(head, one) + 11.0 * rows(head, two) + noise(0.01)
            mask = torch.zeros(plan.length, dtype=torch.int64)
            mask[int(plan.length * (0.25 + 0.5 * ((i * 7) % 16) / 15)) :] = 1
            item = {
                "input_ids": x,
                "loss_mask": mask,
                "aux_hidden_state": aux[None].bfloat16().cpu(),
                "hidden_state": last[None].bfloat16().cpu(),
            }
            torch.save(item, folder / kind / "rows_0-2000" / f"data_{i:05d}.ckpt")

    draft = Eagle3Draft(
        DraftConfig(**plan.shape, rms_norm_eps=1e-5, max_position_embeddings=4096, aux_layer_ids=(0, 1, 2))
    )
    draft.set_vocab(ids)
    draft.lm_head.weight.data.copy_(head[ids.to(dev)].float().cpu())
    export_draft(draft, folder / "draft0")
    (folder / "draft.json").write_text((folder / "draft0" / "config.json").read_text())
    torch.save({"t2d": draft.t2d, "d2t": draft.d2t}, folder / "vocab_mapping.pt")


def load_ours(plan: Plan, root: Path, draft_folder: Path | None = None):  # type: ignore[no-untyped-def]
    import torch
    from safetensors.torch import load_file

    from k2tui.eagle3.export import load_draft
    from k2tui.eagle3.loss import TargetHead

    folder, dev = plan.folder(root), device()
    head = load_file(str(folder / "target" / "model-00001-of-00002.safetensors"), device=str(dev))[
        "lm_head.weight"
    ]
    embed = load_file(str(folder / "target" / "model-00002-of-00002.safetensors"), device=str(dev))[
        "model.embed_tokens.weight"
    ]
    draft = load_draft(draft_folder or folder / "draft0").to(dev)
    draft.set_embedding(embed)
    target = TargetHead(head, draft.target_ids())
    del head
    torch.cuda.empty_cache() if dev.type == "cuda" else None
    return draft, target


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def part_check(plan: Plan, root: Path) -> dict[str, Any]:
    """The fast GPU path against the written-out reference and the plain path."""
    import torch

    from k2tui.eagle3 import kernels

    out: dict[str, Any] = {
        "torch": torch.__version__,
        "triton_kernels": kernels.available(),
        "device": str(device()),
    }
    if torch.cuda.is_available():
        out["name"] = torch.cuda.get_device_name()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-o", "asyncio_mode=auto", "tests/eagle3/test_kernels.py", "tests/eagle3/test_gpu.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    say(done.stdout[-3000:])
    say(done.stderr[-1500:])
    out["pytest"] = done.stdout.strip().splitlines()[-1:] if done.stdout else []
    out["rc"] = done.returncode
    return out


def evaluate(plan: Plan, root: Path, draft, target) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
    """Accuracy of each step and of the whole prefix on the held-out files (SpecForge's mask rule)."""
    import torch

    from k2tui.eagle3.batch import pack
    from k2tui.eagle3.data import CkptStates
    from k2tui.eagle3.ttt import TttOptions, ttt_loss

    states = CkptStates(plan.folder(root) / "hs_eval")
    right = torch.zeros(plan.ttt)
    prefix = torch.zeros(plan.ttt)
    count = torch.zeros(plan.ttt)
    ce = torch.zeros(plan.ttt)
    with torch.no_grad():
        for i in range(len(states.files)):
            made = pack([states.sample(i)], plan.ttt, device(), shifted=False, dtype=torch.bfloat16)
            got = ttt_loss(
                draft, target, made, [0.0] * plan.ttt, TttOptions(ttt_length=plan.ttt, shifted=False)
            )
            table = torch.zeros(made.num_active, plan.ttt, dtype=torch.bool, device=device())
            borne = torch.zeros_like(table)
            losses, hits = got.by_step(made.counts)
            for k, (rows, hit) in enumerate(zip(made.loss_rows, got.correct.split(made.counts), strict=True)):
                table[rows, k] = hit
                borne[rows, k] = True
            both = (table & borne).cumprod(1).bool() & borne
            right += hits.cpu()
            prefix += both.sum(0).cpu()
            count += torch.tensor([float(n) for n in made.counts])
            ce += losses.cpu()
    return {
        "acc": (right / count).tolist(),
        "full_acc": (prefix / count).tolist(),
        "ce": (ce / count).tolist(),
    }


def part_ours_train(plan: Plan, root: Path, out: Path) -> dict[str, Any]:
    """Our trainer's step and loader over the files, as training runs them; then the held-out accuracy."""
    import itertools

    import torch

    from k2tui.eagle3 import kernels, ops
    from k2tui.eagle3.data import CkptStates, Loader, make_pack, plan_epoch
    from k2tui.eagle3.export import export_draft
    from k2tui.eagle3.ranks import Ranks
    from k2tui.eagle3.step import OptimOptions, Stepper, TttModule
    from k2tui.eagle3.ttt import TttOptions

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    ops.set_compile(torch.cuda.is_available())
    draft, target = load_ours(plan, root)
    before = evaluate(plan, root, draft, target)
    options = TttOptions(ttt_length=plan.ttt, shifted=False)
    stepper = Stepper(
        TttModule(draft, target, options),
        OptimOptions(learning_rate=RATE, betas=(0.9, 0.999)),
        Ranks(0, 1, device()),
    )
    states = CkptStates(plan.folder(root) / "hs")
    steps = [
        s
        for e in range(plan.epochs)
        for s in plan_epoch(states.lengths, 0, e, plan.batch, plan.batch * plan.length)
    ]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    pin = torch.cuda.is_available()
    loader = Loader(
        states,
        itertools.chain.from_iterable(steps),
        lambda s: make_pack(s, plan.ttt, shifted=False, dtype=torch.bfloat16),
        depth=3,
        pin=pin,
    )
    times: list[float] = []
    waits: list[float] = []
    rows: list[dict[str, float]] = []
    for n, step in enumerate(steps):
        start = time.perf_counter()
        packs = [next(loader) for _ in step]
        waits.append(time.perf_counter() - start)
        report = stepper.run(
            (p.to(device()) for p in packs), [float(plan.batch * plan.length)] * plan.ttt, n, len(steps)
        )
        sync()
        times.append(time.perf_counter() - start)
        rows.append(
            {
                "t": times[-1],
                "loss": report.loss,
                "tokens": report.tokens,
                "loss_tokens": report.loss_tokens,
                "flops": report.flops,
                "acc0": report.accuracy[0],
                "grad": report.grad_norm,
            }
        )
        if n % 10 == 0:
            say(
                f"  ours {plan.name} step {n}: loss {report.loss:.4f} acc0 {report.accuracy[0]:.3f} {report.tokens / times[-1]:.0f} tok/s"
            )
    steady = rows[min(5, len(rows) // 2) :]
    seconds = sum(r["t"] for r in steady)
    after = evaluate(plan, root, draft, target)
    peak = peak_gib()
    export_draft(draft, plan.folder(root) / "ours")
    return {
        "tok_s": sum(r["tokens"] for r in steady) / seconds, "loss_tok_s": sum(r["loss_tokens"] for r in steady) / seconds,
        "mfu": sum(r["flops"] for r in steady) / seconds / PEAK, "step_s_median": statistics.median(r["t"] for r in steady),
        "wait_share": sum(waits[5:]) / max(sum(times[5:]), 1e-9), "peak_gib": peak, "steps": len(rows), "first_losses": [r["loss"] for r in rows[:5]],
        "last_loss": rows[-1]["loss"], "before": before, "after": after, "triton": kernels.available(), "rows": rows,
    }  # fmt: skip


def part_ours_resident(plan: Plan, root: Path, out: Path) -> dict[str, Any]:
    """Variants of our step on packs that lie on the GPU: what the kernels, torch.compile and the prunings bring."""
    import torch

    from k2tui.eagle3 import ops
    from k2tui.eagle3.batch import Sample, pack
    from k2tui.eagle3.data import CkptStates
    from k2tui.eagle3.ranks import Ranks
    from k2tui.eagle3.step import OptimOptions, Stepper, TttModule
    from k2tui.eagle3.ttt import TttOptions, unpruned_flops

    draft, target = load_ours(plan, root)
    states = CkptStates(plan.folder(root) / "hs")
    found: dict[str, Any] = {}
    dev = device()
    base = [states.sample(i) for i in range(min(8, plan.train))]
    full = [replace(s, loss_mask=torch.ones_like(s.loss_mask)) for s in base]
    turns = []
    for s in base:
        mask = torch.zeros_like(s.loss_mask)
        for start in range(plan.length // 8, plan.length, plan.length // 4):
            mask[start : start + plan.length // 8] = True
        turns.append(Sample(s.input_ids, mask, s.aux, s.last))
    variants: list[tuple[str, list[Sample], bool, bool, TttOptions]] = [
        ("fast, all loss-bearing", full, True, True, TttOptions(ttt_length=plan.ttt)),
        ("fast, half prompt", base, True, True, TttOptions(ttt_length=plan.ttt)),
        ("fast, four turns", turns, True, True, TttOptions(ttt_length=plan.ttt)),
        ("no compile", full, True, False, TttOptions(ttt_length=plan.ttt)),
        ("no triton", full, False, True, TttOptions(ttt_length=plan.ttt)),
        ("recompute gate-up", full, True, True, TttOptions(ttt_length=plan.ttt, recompute=True)),
        ("chunk 16384", full, True, True, TttOptions(ttt_length=plan.ttt, chunk_rows=16384)),
        ("fast, K=3", full, True, True, TttOptions(ttt_length=3)),
    ]
    if plan.name == "k2":
        variants = [
            v
            for v in variants
            if v[0] in ("fast, all loss-bearing", "fast, half prompt", "recompute gate-up", "fast, K=3")
        ]
    for name, samples, triton, compiled, options in variants:
        if deadline_left() < 20:
            break
        os.environ.pop("K2TUI_NO_TRITON", None)
        if not triton:
            os.environ["K2TUI_NO_TRITON"] = "1"
        ops.set_compile(compiled and dev.type == "cuda")
        stepper = Stepper(
            TttModule(draft, target, options), OptimOptions(learning_rate=1e-6), Ranks(0, 1, dev)
        )
        made = pack(samples, options.ttt_length, dev, shifted=True, dtype=torch.bfloat16)
        times = []
        try:
            for n in range(2 if plan.tiny else 5):
                if n == 2 and dev.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                sync()
                start = time.perf_counter()
                report = stepper.run([made], [float(x) for x in made.counts], n, 100)
                sync()
                times.append(time.perf_counter() - start)
        except torch.OutOfMemoryError as err:
            say(f"  {name}: out of memory: {str(err)[:100]}")
            continue
        seconds = statistics.median(times[2:] or times)
        row = {
            "tok_s": made.num_tokens / seconds, "loss_tok_s": made.num_loss_tokens / seconds, "step_s": seconds, "mfu": report.flops / seconds / PEAK,
            "mfu_unpruned": unpruned_flops(draft.config, made, options.ttt_length) / seconds / PEAK, "peak_gib": peak_gib(), "first_s": times[0], "tokens": made.num_tokens,
        }  # fmt: skip
        found[name] = row
        say(
            f"  {plan.name} {name:26s} {row['tok_s']:9.0f} tok/s  {row['loss_tok_s']:9.0f} loss tok/s  MFU {100 * row['mfu']:5.1f} %  (unpruned work {100 * row['mfu_unpruned']:5.1f} %)  {row['peak_gib']:6.1f} GiB  first {times[0]:.1f} s"
        )
        del stepper, made
    if dev.type == "cuda" and deadline_left() > 25:
        ops.set_compile(True)
        os.environ.pop("K2TUI_NO_TRITON", None)
        profile(draft, target, full, plan, out)
    return found


def profile(draft, target, samples, plan: Plan, out: Path) -> None:  # type: ignore[no-untyped-def]
    """Where the time of one step goes, by kernel."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from k2tui.eagle3.batch import pack
    from k2tui.eagle3.ranks import Ranks
    from k2tui.eagle3.step import OptimOptions, Stepper, TttModule
    from k2tui.eagle3.ttt import TttOptions

    stepper = Stepper(
        TttModule(draft, target, TttOptions(ttt_length=plan.ttt)),
        OptimOptions(learning_rate=1e-6),
        Ranks(0, 1, device()),
    )
    made = pack(samples, plan.ttt, device(), dtype=torch.bfloat16)
    stepper.run([made], [float(x) for x in made.counts], 0, 100)
    sync()
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        stepper.run([made], [float(x) for x in made.counts], 1, 100)
        sync()
    table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90)
    (out / f"profile-{plan.name}.txt").write_text(table)
    rows = sorted(
        ((e.self_device_time_total / 1e3, e.count, e.key[:90]) for e in seen.key_averages()), reverse=True
    )[:22]
    say("  kernels of one step (ms, calls):")
    for ms, calls, name in rows:
        say(f"   {ms:8.2f} {calls:5d}  {name}")


def sf_config(plan: Plan, root: Path, batch: int, backend: str, compact: bool, run: str) -> Path:
    folder = plan.folder(root)
    text = {
        "model": {
            "target_model_path": str(folder / "target"), "draft_model_config": str(folder / "draft.json"), "target_backend": "sglang",
            "torch_dtype": "bfloat16", "vocab_mapping_path": str(folder / "vocab_mapping.pt"), "draft_checkpoint_path": str(folder / "draft0"),
        },
        "data": {"hidden_states_path": str(folder / "hs"), "max_length": plan.length, "cache_dir": str(folder / "cache"), "dataloader_num_workers": 0 if plan.tiny else 4},
        "training": {
            "strategy": "eagle3", "num_epochs": plan.epochs, "batch_size": batch, "learning_rate": RATE, "max_grad_norm": 0.5, "ttt_length": plan.ttt,
            "attention_backend": backend, "fsdp_sharding": "NO_SHARD", "log_interval": 1 if plan.tiny else 2, "seed": 0, "compact_teacher": compact,
        },
        "run_id": run, "output_dir": str(folder / f"sf-{run}"), "deployment": {"mode": "local_colocated", "trainer": {"nnodes": 1, "nproc_per_node": 1}},
    }  # fmt: skip
    if run != "main" and not plan.tiny:
        text["training"]["max_steps"] = 12
    path = folder / f"sf-{run}.json"
    path.write_text(json.dumps(text))
    return path


def part_sf_child(config: str, record: str) -> None:
    """Run `specforge train` in this process, keeping what it logs. On a CPU with the changes that one needs there."""
    import torch

    for key, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(32690 + 2 * int(os.environ.get("CUDA_VISIBLE_DEVICES", "0")[:1] or 0)),
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ[key] = value
    if not torch.cuda.is_available():
        torch.compile = lambda fn=None, **_: fn if fn is not None else (lambda f: f)  # type: ignore[assignment]
        import specforge.core.loss as losses

        class OnCpu:
            apply = staticmethod(losses._compute_loss)

        losses.LogSoftmaxLoss = OnCpu
        import specforge.algorithms.eagle3.model as model

        model.LogSoftmaxLoss = OnCpu
    from specforge.cli import main
    from specforge.training import controller

    seen: list[dict[str, Any]] = []
    cls = controller.TrainerController
    fit = cls.fit

    def watched(self, data):  # type: ignore[no-untyped-def]
        logger = self.logger

        def log(metrics, step):  # type: ignore[no-untyped-def]
            row = {
                k: float(v)
                for k, v in metrics.items()
                if isinstance(v, int | float) or (hasattr(v, "numel") and v.numel() == 1)
            }
            seen.append({"step": step, "at": time.perf_counter(), **row})
            if logger:
                logger(metrics, step)

        self.logger = log
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        try:
            return fit(self, data)
        finally:
            Path(record).write_text(
                json.dumps(
                    {
                        "rows": seen,
                        "peak_gib": peak_gib(),
                        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30
                        if torch.cuda.is_available()
                        else 0,
                    }
                )
            )

    cls.fit = watched
    code = main(["train", "-c", config])
    raise SystemExit(code)


def part_specforge(
    plan: Plan, root: Path, out: Path, batch: int, backend: str, compact: bool, run: str
) -> dict[str, Any]:
    config = sf_config(plan, root, batch, backend, compact, run)
    record = plan.folder(root) / f"sf-{run}-record.json"
    start = time.perf_counter()
    log = (out if run == "main" else root) / f"specforge-{plan.name}-{run}.log"
    with log.open("w") as fh:
        code = subprocess.run(
            [sys.executable, __file__, "--sf-child", str(config), str(record)],
            stdout=fh,
            stderr=subprocess.STDOUT,
            timeout=max(30.0, deadline_left() - 10),
            check=False,
        ).returncode
    found: dict[str, Any] = {
        "rc": code,
        "wall_s": time.perf_counter() - start,
        "batch": batch,
        "backend": backend,
        "compact": compact,
    }
    text = log.read_text(errors="replace")
    log.write_text(text[-200_000:])
    if not record.exists():
        say(text[-1500:])
        return found
    got = json.loads(record.read_text())
    rows = got["rows"]
    steady = [r["perf/optimizer_step_time_s"] for r in rows if "perf/optimizer_step_time_s" in r][3:]
    share = loss_share(plan, root)
    if steady:
        seconds = statistics.median(steady)
        found |= {
            "step_s_median": seconds,
            "tok_s": batch * plan.length / seconds,
            "loss_tok_s": batch * plan.length * share / seconds,
        }
    found |= {"peak_gib": got["peak_gib"], "reserved_gib": got["reserved_gib"], "rows": rows}
    if code != 0:
        say(text[-1500:])
    return found


def loss_share(plan: Plan, root: Path) -> float:
    from k2tui.eagle3.data import CkptStates

    states = CkptStates(plan.folder(root) / "hs")
    return sum(int(states.mask(i).sum()) for i in range(plan.train)) / sum(states.lengths)


def part_sf_accuracy(plan: Plan, root: Path, out: Path) -> dict[str, Any]:
    """Export SpecForge's last checkpoint and measure it with the same program as ours."""
    folder = plan.folder(root)
    found = sorted((folder / "sf-main").rglob("*latest*"))
    if not found:
        say("  no SpecForge checkpoint: " + str([str(p) for p in (folder / "sf-main").glob("*")]))
        return {}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from specforge.cli import main; sys.exit(main())", "export", "--to", "sglang", "--checkpoint", str(found[0]), "--draft-config", str(folder / "draft.json"), "--output-dir", str(folder / "sf-export"), "--vocab-mapping", str(folder / "vocab_mapping.pt")],
        capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        say(done.stderr[-1500:])
        return {"rc": done.returncode}
    draft, target = load_ours(plan, root, folder / "sf-export")
    return evaluate(plan, root, draft, target)


def deadline_left() -> float:
    return float(os.environ.get("BENCH_END", "1e12")) - time.time()


def child(part: str, shape: str, args: argparse.Namespace, gpu: str) -> dict[str, Any]:
    """Run one part in a process of its own; its result, {} when it failed."""
    result = args.root / f"{part}-{shape}.json"
    result.unlink(missing_ok=True)
    line = [
        sys.executable,
        __file__,
        "--out",
        str(args.out),
        "--root",
        str(args.root),
        "--part",
        part,
        "--shape",
        shape,
        *(["--tiny"] if args.tiny else []),
    ]
    start = time.perf_counter()
    try:
        subprocess.run(
            line,
            timeout=max(20.0, deadline_left()),
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
    except subprocess.TimeoutExpired:
        say(f"  {part} {shape}: no time left")
    say(f"[{part} {shape}: {time.perf_counter() - start:.0f} s, {deadline_left():.0f} s left]")
    return json.loads(result.read_text()) if result.exists() else {}


def part_cli(plan: Plan, root: Path, out: Path, ranks: int, shard: bool) -> dict[str, Any]:
    """The trainer as people start it (torchrun for more than one rank): speed, memory and the loss curve."""
    folder, name = plan.folder(root), f"cli-{ranks}{'-shard' if shard else ''}"
    module = ["-m", "k2tui.eagle3.train"]
    start = [sys.executable, *module] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", "32691", *module]  # fmt: skip
    line = [
        *start, "--states", str(folder / "hs"), "--target", str(folder / "target"), "--init", str(folder / "draft0"), "--out", str(folder / name), "--held-out", "0", "--chains", "0",
        "--epochs", "2", "--max-steps", "16", "--batch-size", str(2 * plan.batch), "--max-tokens", str(plan.batch * plan.length), "--ttt-length", str(plan.ttt), "--lr", str(RATE),
        *(["--shard"] if shard else []), *(["--max-tokens", "256"] if plan.tiny else []),
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=max(30.0, deadline_left() - 5), check=False, cwd=ROOT
    )
    found: dict[str, Any] = {"rc": done.returncode, "wall_s": time.perf_counter() - began}
    metrics = folder / name / "metrics.jsonl"
    if done.returncode or not metrics.exists():
        say(done.stderr[-2000:])
        return found
    rows = [r for r in map(json.loads, metrics.read_text().splitlines()) if r["kind"] == "step"]
    steady = rows[6:] or rows
    found |= {
        "tok_s": statistics.median(r["tok_s"] for r in steady), "loss_tok_s": statistics.median(r["loss_tok_s"] for r in steady), "losses": [r["loss"] for r in rows],
        "grad_norms": [r["grad_norm"] for r in rows], "wait_share": statistics.median(r["wait_share"] for r in steady), "peak_gib": (rows[-1]["memory_b"] or 0) / 2**30,
    }  # fmt: skip
    mfus = [r["mfu"] for r in steady if r["mfu"]]
    if mfus:
        found["mfu"] = statistics.median(mfus)
    say(f"  {name}: losses {' '.join(f'{x:.4f}' for x in found['losses'][:8])} ... {found['losses'][-1]:.4f}")
    return found


PARTS: dict[str, Any] = {
    "cli1": lambda p, r, o: part_cli(p, r, o, 1, False),
    "cli2": lambda p, r, o: part_cli(p, r, o, 2, False),
    "clishard": lambda p, r, o: part_cli(p, r, o, 2, True),
    "check": lambda p, r, o: part_check(p, r),
    "data": lambda p, r, o: make_data(p, r) or {"ok": True},
    "train": part_ours_train,
    "resident": part_ours_resident,
    "sf": lambda p, r, o: part_specforge(
        p, r, o, p.batch, "sdpa" if p.tiny else "flex_attention", False, "main"
    ),
    "sfcompact": lambda p, r, o: part_specforge(
        p, r, o, p.batch, "sdpa" if p.tiny else "flex_attention", True, "compact"
    ),
    "sfsmall": lambda p, r, o: part_specforge(
        p, r, o, max(1, p.batch // 4), "sdpa" if p.tiny else "flex_attention", False, "small"
    ),
    "sfbig": lambda p, r, o: part_specforge(
        p, r, o, 2 * p.batch, "sdpa" if p.tiny else "flex_attention", False, "big"
    ),
    "sfacc": part_sf_accuracy,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("/tmp/k2tui-eagle3-bench"))
    parser.add_argument("--root", type=Path, default=Path("/tmp/k2tui-eagle3-bench-data"))
    parser.add_argument("--wheels", type=Path)
    parser.add_argument(
        "--parts",
        default="",
        help="comma list of part:shape, run in turn; default: all, by the number of GPUs",
    )
    parser.add_argument("--gpu", default="0", help="with --parts: the GPU to run them on (parts for two ranks take both)")
    parser.add_argument("--keep", action="store_true", help="leave the data in --root, for another call")
    parser.add_argument("--deadline", type=float, default=560.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--sf-child", nargs=2)
    args = parser.parse_args()
    if args.sf_child:
        part_sf_child(*args.sf_child)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.root.mkdir(parents=True, exist_ok=True)
    if args.part:
        got = PARTS[args.part](Plan(args.shape, args.tiny), args.root, args.out)
        (args.root / f"{args.part}-{args.shape}.json").write_text(json.dumps(got))
        return
    os.environ["BENCH_END"] = str(time.time() + args.deadline)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.wheels:
        site = args.root / "site"
        site.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site), *map(str, sorted(args.wheels.glob("*.whl")))], check=False)  # fmt: skip
        os.environ["PYTHONPATH"] = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    results: dict[str, Any] = {}
    lanes = [args.parts.split(",")] if args.parts else lanes_for(gpu_count())
    if len(lanes) == 1:
        lane(lanes[0], args.gpu, args, results)
    else:
        threads = [
            threading.Thread(target=lane, args=(one, str(n), args, results))
            for n, one in enumerate(lanes[:2])
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for rest in lanes[2:]:
            lane(rest, "0,1", args, results)
    table(results)
    if not args.keep:
        shutil.rmtree(args.root, ignore_errors=True)


def gpu_count() -> int:
    done = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if shutil.which("nvidia-smi")
        else None
    )
    return len(done.stdout.splitlines()) if done else 0


def lanes_for(gpus: int) -> list[list[str]]:
    """One GPU: everything in turn, the most wanted first. Two: ours on the first, SpecForge on the second, then both together."""
    if gpus < 2:
        return [
            [
                "data:k2",
                "sf:k2",
                "train:k2",
                "data:8b",
                "train:8b",
                "sf:8b",
                "sfacc:8b",
                "resident:8b",
                "sfcompact:8b",
                "resident:k2",
                "sfsmall:8b",
            ]
        ]
    ours = ["data:k2", "data:8b", "train:8b", "train:k2", "cli1:8b", "resident:8b", "sfcompact:8b"]
    theirs = ["sf:k2", "sf:8b", "sfacc:8b"]
    return [ours, theirs, ["cli2:8b", "clishard:8b"], ["resident:k2"]]


def lane(items: list[str], gpu: str, args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Parts in turn on the given GPUs; one that needs another's data waits for it."""
    for item in items:
        part, shape = item.split(":")
        if deadline_left() < 25:
            say(f"[{item}: skipped, no time left]")
            continue
        while part != "data" and f"data:{shape}" not in results and not args.parts and deadline_left() > 25:
            time.sleep(0.5)
        say(f"== {item} (GPU {gpu})")
        got = child(part, shape, args, "0,1" if part in TWO_RANKS else gpu)
        with LOCK:
            results[item] = got
            table(results)
            slim = json.loads(json.dumps(results))
            for value in slim.values():
                if isinstance(value, dict) and not args.tiny:
                    value["rows"] = (value.get("rows") or [])[:40]
            plans = {name: vars(Plan(name, args.tiny)) for name in ("8b", "k2")}
            (args.out / "eagle3-gpu.json").write_text(json.dumps({"plans": plans, "results": slim}, indent=1))


LOCK = threading.Lock()
TWO_RANKS = ("cli2", "clishard")


def table(results: dict[str, Any]) -> None:
    say(f"{'':16s} {'tok/s':>9s} {'loss tok/s':>10s} {'MFU %':>6s} {'GiB':>6s}  held-out full_acc")
    for name, r in results.items():
        if "tok_s" not in r and "full_acc" not in r:
            continue
        acc = r.get("after", r).get("full_acc") if isinstance(r.get("after", r), dict) else None
        shown = " ".join(f"{a:.3f}" for a in acc[:4]) if acc else ""
        mfu = f"{100 * r['mfu']:6.1f}" if "mfu" in r else "     -"
        say(
            f"{name:16s} {r.get('tok_s', 0):9.0f} {r.get('loss_tok_s', 0):10.0f} {mfu} {r.get('peak_gib', 0):6.1f}  {shown}"
        )


if __name__ == "__main__":
    main()
