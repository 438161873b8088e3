#!/bin/bash
# One stage of a measurement on a GPU machine, logs and results under $OUT:
#
#     [SITE=dir] [OUT=dir] [BUDGET=s] bash eval/gpu/session.sh STAGE [arguments]
#
# SITE: folder with SGLang and what it needs, unless they are installed. If it holds env.sh, that
# is read too. PYTHON: the interpreter. Each stage ends within BUDGET seconds, 560 by default, or a
# minute behind that if its last server has to be killed. Folders are named from the repository.
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 2
STAGE=${1:-}; shift || true
export OUT=${OUT:-$PWD/runs/gpu}
BUDGET=${BUDGET:-560}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
if [ -n "${SITE:-}" ]; then
  SITE=$(cd "$SITE" && pwd) || exit 2
  if [ -f "$SITE/env.sh" ]; then . "$SITE/env.sh"; fi
fi
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${SITE:+:$SITE}${PYTHONPATH:+:$PYTHONPATH}

# run NAME COMMAND...: within the budget, its output on the screen and in $OUT/NAME.log
run() {
  local name=$1; shift
  echo "== $*"
  # Stopping a server takes up to 40 s; who is killed earlier leaves it on the GPU.
  timeout --signal=TERM --kill-after=60 "$BUDGET" "$@" 2>&1 | tee "$OUT/$name.log"
  local code=$?
  echo "== $name: exit code $code"
  return $code
}

case "$STAGE" in
  check)
    run check "$PYTHON" -m eval.gpu.check --out "$OUT/check" "$@" ;;
  tests)
    run tests "$PYTHON" -m pytest -m gpu tests/cuda tests/kernels tests/draft/test_chain.py \
      tests/policies -p no:cacheprovider -rA --tb=short "$@" ;;
  microbench)
    run ceilings "$PYTHON" -m eval.gpu.roofline --out "$OUT/ceilings.json" ${CEILINGS:-} &&
      run microbench "$PYTHON" -m eval.gpu.microbench --ceilings "$OUT/ceilings.json" \
        --out "$OUT/micro.json" "$@" ;;
  throughput)
    # One budget less what stopping the last server takes.
    run throughput "$PYTHON" -m eval.run eval/configs/gpu-replay.toml --out "$OUT/throughput" \
      --budget-s $((BUDGET - 40)) "$@" ;;
  report)
    run report "$PYTHON" -m eval.report "$OUT/throughput" \
      $([ -f "$OUT/ceilings.json" ] && echo --ceilings "$OUT/ceilings.json") "$@" ;;
  *)
    echo "stages: check tests microbench throughput report" >&2
    exit 2 ;;
esac
