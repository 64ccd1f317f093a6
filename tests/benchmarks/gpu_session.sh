#!/bin/bash
# Everything that needs GPUs, in one go on a machine with two of them that is there for half an hour only:
#
#   SITE=FOLDER K2SITE=FOLDER SFSITE=FOLDER setsid nohup bash tests/benchmarks/gpu_session.sh KIT OUT > OUT.log 2>&1 &
#
# KIT: a folder with random_target.py, stubs/ and tiny_tokenizer/. SITE: SGLang installed with `pip install --target` (for this machine's
# Python), K2SITE: textual and what it needs, SFSITE: specforge 0.2.0, yunchang, datasets and what they need. Machines without a network get
# them ready made: `pip install --target FOLDER --python-version 3.12 --only-binary=:all: --no-deps ...` elsewhere, then tar.
# OUT/story/corpus.jsonl.xz and OUT/story/tokenizer/ save a minute when they are there. Each part's log is OUT/PART.log; what it measured lies
# in OUT/PART. Seconds on two H200s: machine 105, tune 640, then side by side story 1020 and (specforge 610, capture 220), ranks 230.
set -u
KIT=$(cd "$1" && pwd); mkdir -p "$2"; OUT=$(cd "$2" && pwd); ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PARTS=${PARTS:-machine,tune,story,specforge,capture,three,ranks}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 SITE
cd "$ROOT"
SINCE=$(date +%s)
say() { echo "[$(($(date +%s) - SINCE)) s] $*"; }
wants() { case ",$PARTS," in *",$1,"*) return 0 ;; *) return 1 ;; esac }

# an interpreter that has SGLang, for profiles; further paths of the caller come first
cat > "$OUT/py-sglang" <<W
#!/bin/bash
export PYTHONPATH="\${PYTHONPATH:+\$PYTHONPATH:}$SITE:$KIT/stubs"
exec python3 "\$@"
W
chmod +x "$OUT/py-sglang"

part_machine() { PYTHONPATH=$ROOT python3 tests/benchmarks/gpu_machine.py "$OUT/machine" --seconds 15; }
part_tune() { PYTHONPATH=$ROOT timeout $((${TUNE_S:-480} + 60)) python3 tests/benchmarks/gpu_tune.py "$KIT" --seconds "${TUNE_S:-480}" --out "$OUT/tune"; }
part_three() { CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$ROOT python3 tests/benchmarks/three_starts.py --gpu --kit "$KIT" --keep "$OUT/three"; }
part_story() {
  local args=(--out "$OUT/story" --sglang "$OUT/py-sglang" --seconds "${TARGET_S:-200}" --env STUB_ROOTS=soundfile,xgrammar,llguidance,flashinfer)
  local flag
  for flag in --attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs 64 --disable-piecewise-cuda-graph; do args+=("--arg=$flag"); done
  export CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$ROOT
  python3 tests/benchmarks/story_gpu.py "${args[@]}" --env CUDA_VISIBLE_DEVICES=0 --parts target,pipeline,report
  K2TUI_HOME=$OUT/story/home K2TUI_CONFIG=$OUT/story/k2tui.toml python3 -m k2tui down
}
part_specforge() {
  PYTHONPATH=$SFSITE:$ROOT python3 tests/benchmarks/eagle3_gpu.py --out "$OUT/specforge" --root "$OUT/eagle3-data" --keep --gpu 1 --deadline "${SPECFORGE_S:-600}" \
    --parts "${SPECFORGE_PARTS:-data:8b,train:8b,sf:8b,sfacc:8b,sfcompact:8b,sfsmall:8b,sfbig:8b}"
}
part_capture() {
  export CUDA_VISIBLE_DEVICES=1
  PYTHONPATH=$SITE:$ROOT python3 tests/benchmarks/capture_gpu.py --kit "$KIT" --work "$OUT/capture-work" --limit-s "${CAPTURE_S:-270}" --rounds 2 ${CAPTURE_ARGS:-}
}
part_ranks() { PYTHONPATH=$ROOT python3 tests/benchmarks/eagle3_gpu.py --out "$OUT/ranks" --root "$OUT/eagle3-data" --keep --deadline 300 --parts "${RANKS_PARTS:-clishard:8b,cli1:8b,cli2:8b}"; }
run() {
  wants "$1" || return 0
  "part_$1" > "$OUT/$1.log" 2>&1
  say "$1: exit code $?"
}

run machine
run tune
[ -n "${K2SITE:-}" ] && wants story && setsid bash tests/benchmarks/gpu_dash.sh "$OUT" > "$OUT/dash.log" 2>&1 &
(run story; run three) & A=$!
(run specforge; run capture) & B=$!
wait $A $B
touch "$OUT/dash.over"
run ranks
say "all done"
touch "$OUT/all.done"
