#!/usr/bin/env bash
# The main job, end to end, on this machine's CPUs: trains a small Llama-style model on real C++ text over 2
# processes, saves a sharded checkpoint mid-way, loses a rank to SIGKILL, resumes on 4 processes and on 1, and
# compares the losses that follow with a run that was never interrupted.
#
#   scripts/demo.sh [--text FILE_OR_FOLDER] [--steps N] [--save-at N] [--bin FOLDER] [--out FOLDER] [-- model flags]
#
# Every row of the last table is computed in this run; a row that fails makes the exit code 1.
set -u -o pipefail
cd "$(dirname "$0")/.." || exit 1

bin="build/${PRESET:-release}/bin"
out=outputs/demo
text=""
steps=160
save_at=80
while [ $# -gt 0 ]; do
  case "$1" in
    --text) text=$2; shift 2 ;;
    --steps) steps=$2; shift 2 ;;
    --save-at) save_at=$2; shift 2 ;;
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --) shift; break ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "demo: unknown option $1; see scripts/demo.sh --help" >&2; exit 2 ;;
  esac
done
compared=$((steps - save_at))
if [ "$compared" -lt 20 ]; then
  echo "demo: --steps must be at least 20 more than --save-at, to compare at least 20 losses" >&2
  exit 2
fi
for program in fsdp2 llama_train; do
  if [ ! -x "$bin/$program" ]; then
    echo "demo: no $bin/$program; build first: make build" >&2
    exit 2
  fi
done
if [ -z "$text" ]; then
  # The headers of the libtorch that the program runs with.
  libtorch=$(ldd "$bin/llama_train" | awk '/libtorch_cpu/ {print $3}')
  text=$(dirname "$libtorch")/../include/ATen
fi

began=$SECONDS
# The folder is emptied first: only one that this script made, or an empty one.
if [ "$out" != outputs/demo ] && [ -n "$(ls -A "$out" 2>/dev/null)" ] && [ ! -e "$out/.made_by_demo" ]; then
  echo "demo: $out is not empty and not from an earlier run; name another folder with --out" >&2
  exit 2
fi
rm -rf "$out"
mkdir -p "$out"
touch "$out/.made_by_demo"
checkpoint=$out/checkpoint
short=$((save_at + 30 < steps ? save_at + 30 : steps))
common=(--text "$text" --decay-steps "$steps" "$@")

heading() { printf '\n== %s\n' "$1"; }
# train PROCESSES NAME flags...: its losses and events go to $out/NAME.jsonl
train() {
  local processes=$1 name=$2
  shift 2
  "$bin/fsdp2" run --nproc-per-node "$processes" --rdzv-id "fsdp2-demo-$$-$name" \
    "$bin/llama_train" --log "$out/$name.jsonl" "${common[@]}" "$@"
}
# field NAME EVENT KEY: a number of that event
field() { sed -n "/\"event\":\"$2\"/s/.*\"$3\":\([^,}]*\).*/\1/p" "$out/$1.jsonl" 2>/dev/null | head -n 1; }
# losses NAME: lines "step loss"
losses() {
  sed -n 's/.*"event":"step".*"loss":\([^,}]*\).*"step":\([0-9]*\).*/\2 \1/p' "$out/$1.jsonl" 2>/dev/null
}
# compare NAME: "number-of-losses largest-difference" against the uninterrupted run, after the checkpoint
compare() {
  awk -v after="$save_at" '
    NR == FNR { expected[$1] = $2; next }
    $1 > after && ($1 in expected) {
      difference = $2 - expected[$1]
      if (difference < 0) difference = -difference
      if (difference != difference || difference > largest) largest = difference
      ++count
    }
    END { printf "%d %.1e\n", count, largest }' <(losses uninterrupted) <(losses "$1")
}

failed=0
rows=()
# row VERDICT NAME VALUE: the verdict is 0 for shown
row() {
  local mark=ok
  if [ "$1" -ne 0 ]; then
    mark=FAIL
    failed=1
  fi
  rows+=("$(printf '%-5s %-34s %s' "$mark" "$2" "$3")")
}
holds() { awk "BEGIN { exit !($1) }"; }

heading "2 processes, $steps steps, never interrupted"
export OMP_NUM_THREADS=1  # more threads than cores wait for each other more than they compute
train 2 uninterrupted --steps "$steps" || echo "demo: the run failed" >&2

heading "2 processes again: checkpoint after step $save_at, then one rank is killed"
train 2 interrupted --steps "$steps" --save-at "$save_at" --checkpoint "$checkpoint" &
job=$!
while kill -0 $job 2>/dev/null && ! grep -q '"event":"saved"' "$out/interrupted.jsonl" 2>/dev/null; do sleep 0.2; done
victim=$(sed -n 's/.*"event":"saved".*"pids":\["[0-9]*","\([0-9]*\)".*/\1/p' "$out/interrupted.jsonl")
if [ -n "$victim" ]; then
  echo "demo: the save returned; kill -9 $victim (rank 1)"
  kill -9 "$victim"
fi
wait $job
killed_code=$?
left=$(grep -lsz "fsdp2-demo-$$-interrupted" /proc/[0-9]*/environ 2>/dev/null | wc -l)

heading "resumed on 4 processes"
train 4 resumed_on_4 --steps "$short" --resume "$checkpoint" || echo "demo: the run failed" >&2

heading "resumed on 1 process"
train 1 resumed_on_1 --steps "$steps" --resume "$checkpoint" --sample 400 --sample-file "$out/sample.txt" \
  --prompt $'namespace at {\n' ||
  echo "demo: the run failed" >&2

heading "C++ written by the model"
cat "$out/sample.txt" 2>/dev/null

parameters=$(field uninterrupted start parameters)
local_parameters=$(field uninterrupted start local_parameters)
first=$(losses uninterrupted | awk 'NR == 1 { printf "%.4f", $2 }')
last=$(losses uninterrupted | tail -n 10 | awk '{ sum += $2 } END { if (NR) printf "%.4f", sum / NR }')
data_files=$(find "$checkpoint" -name '*.distcp' 2>/dev/null | wc -l)
size=$(du -sk "$checkpoint" 2>/dev/null | awk '{ printf "%.0f MiB", $1 / 1024 }')
read -r count_4 difference_4 <<<"$(compare resumed_on_4)"
read -r count_1 difference_1 <<<"$(compare resumed_on_1)"
sample_bytes=$(wc -c <"$out/sample.txt" 2>/dev/null || echo 0)
printable=$(LC_ALL=C tr -cd '\11\12\40-\176' <"$out/sample.txt" 2>/dev/null | wc -c)
seconds=$((SECONDS - began))

holds "${parameters:-0} > 0 && ${local_parameters:-0} <= 0.51 * ${parameters:-0}"
row $? "built on meta, sharded over 2" "${parameters:-no} parameters, ${local_parameters:-none} of them on rank 0"
holds "${last:-99} < 0.6 * ${first:-0}"
row $? "trained on 2 processes" \
  "loss ${first:-none} -> ${last:-none} on $(field uninterrupted start bytes) bytes of text"
[ -f "$checkpoint/.metadata" ] && [ "$data_files" -ge 2 ]
row $? "sharded checkpoint" "after step $save_at: $data_files data files and .metadata, ${size:-nothing}"
[ -n "$victim" ] && [ "$killed_code" -eq 137 ] && [ "$left" -eq 0 ]
row $? "rank 1 ended by SIGKILL" "fsdp2 run gave $killed_code (128 + 9), $left processes left behind"
holds "${count_4:-0} >= 20 && ${difference_4:-1} <= 1e-4"
row $? "resumed on 4 processes" "$count_4 losses, largest difference $difference_4 (allowed 1e-4)"
holds "${count_1:-0} >= 20 && ${difference_1:-1} <= 1e-4"
row $? "resumed on 1 process" "$count_1 losses, largest difference $difference_1 (allowed 1e-4)"
holds "$sample_bytes >= 200 && $printable >= 0.95 * $sample_bytes"
row $? "text written by the model" "$sample_bytes bytes, $printable of them printable"
row 0 "time" "$seconds s for all runs"

heading "what was shown"
printf '%s\n' "${rows[@]}"
if [ "$failed" -ne 0 ]; then echo "demo: a row failed" >&2; fi
exit "$failed"
