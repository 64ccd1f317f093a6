#!/bin/bash
# The dashboard in tmux while gpu_session.sh tells its story: OUT/dash/NUMBER-SIZE-SCREEN.ans (text with colours) every few seconds, and pictures
# saved by the dashboard itself in OUT/story/home/saved. TMUX_DIR: a folder with tmux, lib/ and terminfo/, where the machine has no tmux.
OUT=$1; mkdir -p "$OUT/dash"
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
if [ -n "${TMUX_DIR:-}" ]; then
  export LD_LIBRARY_PATH=$TMUX_DIR/lib TERMINFO_DIRS=$TMUX_DIR/terminfo:/lib/terminfo:/usr/share/terminfo
  PATH=$TMUX_DIR:$PATH
fi
export LC_ALL=C.UTF-8 LANG=C.UTF-8
T="tmux -L k2-session -f /dev/null"
until [ -e "$OUT/story/home/chains/story" ]; do sleep 1; [ -e "$OUT/dash.over" ] && exit; done
start() { # name width height
  $T new-session -d -c "$OUT/story" -s "$1" -x "$2" -y "$3" "env -u LD_LIBRARY_PATH K2TUI_HOME=$OUT/story/home K2TUI_CONFIG=$OUT/story/k2tui.toml \
    PYTHONPATH=$ROOT:$K2SITE TERM=tmux-256color COLORTERM=truecolor python3 -m k2tui 2>$OUT/dash/$1.err; sleep 1000"
}
$T new-session -d -s base -x 120 -y 40 "sleep 3000"
$T set -g default-terminal tmux-256color; $T set -ga terminal-overrides ",*:Tc"
start 120x40 120 40; start 80x24 80 24; start 200x60 200 60
sleep 4
n=0
while [ ! -e "$OUT/dash.over" ] && [ $n -lt 70 ]; do
  for size in 120x40 80x24 200x60; do
    [ $size != 120x40 ] && [ $((n % 4)) != 2 ] && continue
    for key in 1 2 3 4 5 6 7 8; do
      $T send-keys -t $size $key; sleep 0.7
      $T capture-pane -e -p -t $size > "$OUT/dash/$(printf %03d $n)-$size-$key.ans" 2>/dev/null
    done
  done
  if [ $((n % 3)) = 1 ]; then
    for key in 1 2 3 5 8; do
      $T send-keys -t 120x40 $key; sleep 0.5; $T send-keys -t 120x40 C-p; sleep 0.8
      $T send-keys -t 120x40 -l "save a picture"; sleep 0.8; $T send-keys -t 120x40 Enter; sleep 0.8
    done
  fi
  n=$((n + 1)); sleep 3
done
$T kill-server
