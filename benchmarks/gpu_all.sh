#!/usr/bin/env bash
# GPU checks and measurements in one run, each with a limit of its own (LIMIT seconds), so that one that hangs or
# fails leaves the others their time: gpu_all.sh OUTPUT_DIRECTORY [tests|CASE]...
set -u
out=${1:?usage: gpu_all.sh OUTPUT_DIRECTORY [tests|CASE]...}
shift
here=$(dirname "$0")
status=0
for case in "$@"; do
  echo "== $case"
  if [ "$case" = tests ]; then
    timeout "${LIMIT:-300}" python3 -m pytest -q -n 14 -rf "$here/../tests" >"$out/tests.log" 2>&1
    failed=$?
    grep -E "^(FAILED|ERROR|E  )|passed|failed" "$out/tests.log" | cut -c1-300 | head -n 40
  else
    timeout "${LIMIT:-300}" python3 "$here/gpu_steps.py" $case >"$out/$case.jsonl" 2>"$out/$case.log"
    failed=$?
    cat "$out/$case.jsonl"
    [ $failed -eq 0 ] || tail -n 30 "$out/$case.log"
  fi
  [ $failed -eq 0 ] || status=$failed
done
exit $status
