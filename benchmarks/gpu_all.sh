#!/usr/bin/env bash
# GPU measurements in one run: gpu_all.sh OUTPUT_DIRECTORY CASE...
set -u
out=${1:?usage: gpu_all.sh OUTPUT_DIRECTORY CASE...}
shift
here=$(dirname "$0")
for case in "$@"; do
  echo "== $case"
  timeout 330 python3 "$here/gpu_steps.py" $case >"$out/$case.jsonl" 2>"$out/$case.log"
  status=$?
  cat "$out/$case.jsonl"
  if [ $status -ne 0 ]; then
    tail -n 30 "$out/$case.log"
    exit $status
  fi
done
