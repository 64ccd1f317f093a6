"""Why a draft does not help: what it was trained on against what will be served, by its record and by trying it out.

A draft fed other layers, another model's states or another template gives no error anywhere; it is accepted seldom. The record in the
draft's config.json tells most cases; states of the target with more layers than the draft reads tell the rest, also when the record
is wrong or missing: the draft is read along every set of layers, and the set that it knows stands out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from k2tui.capture import ids as layer_ids
from k2tui.eagle3 import guard, ops
from k2tui.eagle3.batch import Sample
from k2tui.eagle3.checkpoint import load_draft
from k2tui.eagle3.data import MemoryStates, States, open_states
from k2tui.eagle3.draft import Eagle3Draft
from k2tui.eagle3.evaluate import evaluate
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.step import TttModule
from k2tui.eagle3.target import Target, load_target, target_folder
from k2tui.eagle3.ttt import TttOptions
from k2tui.errors import K2Error

NOTHING = 1.05  # an accept length below this is nothing accepted
BETTER = (
    1.05  # another set of layers, on the same samples, must be accepted that many times longer to be named
)
MOST_SETS = 120


@dataclass(frozen=True)
class Finding:
    """One check. kind: model | tokenizer | template | engine | layers | vocabulary | accuracy. ok None: could not be told."""

    kind: str
    ok: bool | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def why(
    draft_folder: Path, target: str, states: str = "", served_version: str = "0.5.23", samples: int = 8
) -> list[Finding]:
    """All checks. states: a states folder of this target, best with all its layers (extract --boundaries 0,1,2,...). Raises K2Error."""
    folder = target_folder(target)
    loaded = load_target(folder)
    ops.fit_threads(loaded.hidden_size)
    draft = load_draft(draft_folder)
    found = list(_by_record(draft_folder, draft, folder, loaded, served_version))
    if states:
        found += _by_trial(draft, folder, loaded, Path(states), served_version, samples)
    return found


def _served(draft: Eagle3Draft, target: Target, version: str) -> tuple[int, ...]:
    """Boundaries that SGLang of that version feeds the draft."""
    rule = layer_ids.rule_of(target.architecture, "sglang", version)
    return layer_ids.to_boundaries(draft.config.aux_layer_ids or None, target.num_layers, rule)


def _by_record(
    where: Path, draft: Eagle3Draft, folder: Path, target: Target, version: str
) -> Iterator[Finding]:
    config = draft.config
    if config.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        yield Finding(
            "model",
            False,
            f"a draft for a target {config.hidden_size} wide with {config.vocab_size} tokens; this one is {target.hidden_size} wide with {target.vocab_size}",
        )
        return
    raw = json.loads((where / "config.json").read_text(encoding="utf-8"))
    record = (raw.get("k2tui") or {}).get("states") or {}
    if not record:
        yield Finding(
            "model",
            None,
            "the draft does not say what it was trained on (another trainer made it, or plain .ckpt files)",
        )
    else:
        wrong = guard.against_target(record, folder, target.hidden_size, target.vocab_size)
        for kind, sentence in wrong:
            yield Finding(kind, False, f"trained on states {sentence}")
        if not wrong:
            yield Finding(
                "model", True, "trained on states of this target, with its tokenizer and chat template"
            )
    try:
        served = _served(draft, target, version)
    except K2Error as err:
        yield Finding("layers", False, err.message)
        return
    trained = tuple(record.get("boundaries") or ())
    said = list(config.aux_layer_ids) if config.aux_layer_ids else "none (the default)"
    if trained and trained != served:
        yield Finding(
            "layers",
            False,
            f"trained on layers {list(trained)}, but its layer ids {said} make SGLang {version} feed it {list(served)}",
        )
    elif trained:
        yield Finding(
            "layers",
            True,
            f"trained on layers {list(trained)}, which its ids {said} mean in SGLang {version}",
        )
    else:
        yield Finding(
            "layers",
            None,
            f"its layer ids {said} make SGLang {version} feed it {list(served)}; what it was trained on is not recorded",
        )


def _by_trial(
    draft: Eagle3Draft, folder: Path, target: Target, path: Path, version: str, count: int
) -> list[Finding]:
    states = open_states(path, norm=target.normed)
    origin = guard.origin_of(states)
    if not origin:
        raise K2Error(
            f"{path}: states that do not say which layers they hold",
            "extract them from the target with k2tui extract",
        )
    found = [
        Finding(kind, False, f"the states to try it on are {text}")
        for kind, text in guard.against_target(origin, folder, target.hidden_size, target.vocab_size)
    ]
    if found:
        return found
    there = tuple(origin["boundaries"])
    served = _served(draft, target, version)
    missing = sorted(set(served) - set(there))
    if missing:
        raise K2Error(
            f"{path}: holds layers {list(there)}; this draft is fed {list(served)}",
            f"extract with --boundaries {','.join(map(str, sorted({*there, *served})))}",
        )
    picked = [states.sample(i) for i in range(min(count, len(states.lengths)))]
    draft.set_embedding(target.embedding.float())
    module = TttModule(draft, TargetHead(target.head.float(), draft.target_ids()), TttOptions(ttt_length=3))
    report = evaluate(
        module,
        _layers(picked, there, served, target.hidden_size),
        Ranks.start("cpu"),
        max_tokens=4096,
        dtype=draft.fc.weight.dtype,
    )
    if report.covered < 0.8:
        found.append(
            Finding(
                "vocabulary",
                False,
                f"its draft vocabulary holds only {100 * report.covered:.0f} % of what the target says",
            )
        )
    as_fed = report.accept_length
    best, length = _best(module, picked, there, served, target.hidden_size)
    if best != served and length > BETTER * as_fed:
        found.append(
            Finding(
                "layers",
                False,
                f"fed {list(served)} as SGLang {version} will, {as_fed:.2f} tokens are accepted; fed {list(best)}, {length:.2f}: it was trained on those layers, or on ones beside them",
            )
        )
    elif as_fed < NOTHING:
        found.append(
            Finding(
                "accuracy",
                False,
                f"{as_fed:.2f} tokens are accepted on states of this target, whatever layers it is fed: trained too little, or on another model's states",
            )
        )
    else:
        found.append(
            Finding(
                "accuracy",
                True,
                f"{as_fed:.2f} tokens are to be accepted on states of this target, fed layers {list(served)}",
            )
        )
    return found


def _layers(samples: Sequence[Sample], there: Sequence[int], wanted: Sequence[int], hidden: int) -> States:
    """The samples with these layers' states alone, in that order."""
    import torch

    out: list[Sample] = []
    for s in samples:
        parts = [s.aux[:, hidden * there.index(b) : hidden * (there.index(b) + 1)] for b in wanted]
        out.append(Sample(s.input_ids, s.loss_mask, torch.cat(parts, 1), s.last))
    return MemoryStates(out)


def _best(
    module: TttModule, samples: Sequence[Sample], there: Sequence[int], served: tuple[int, ...], hidden: int
) -> tuple[tuple[int, ...], float]:
    """The set of layers along which the draft is accepted longest, and how long."""
    sets = list(combinations(there, len(served)))[:MOST_SETS]
    tried: list[tuple[float, tuple[int, ...]]] = []
    for chosen in dict.fromkeys([served, *sets]):
        report = evaluate(
            module,
            _layers(samples, there, chosen, hidden),
            Ranks.start("cpu"),
            max_tokens=4096,
            dtype=module.draft.fc.weight.dtype,
        )
        tried.append((report.accept_length, chosen))
    length, best = max(tried, key=lambda t: t[0])
    return best, length
