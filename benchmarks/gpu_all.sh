#!/usr/bin/env bash
# All GPU measurements in one run; results go to the directory given first.
set -u
out=${1:?usage: gpu_all.sh OUTPUT_DIRECTORY}
here=$(dirname "$0")
for case in "paged --hidden 1024 --layers 8" fits paged memory; do
  name=$(echo "$case" | tr -cd 'a-z0-9')
  echo "== $case"
  timeout 240 python3 "$here/gpu_steps.py" $case >"$out/$name.jsonl" 2>"$out/$name.log"
  status=$?
  cat "$out/$name.jsonl"
  if [ $status -ne 0 ]; then
    # The first case is small: what breaks it breaks the others, too.
    tail -n 40 "$out/$name.log"
    exit $status
  fi
done
