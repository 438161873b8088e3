#!/bin/bash
# The first measurement on a GPU, within ten minutes; may be cut off at any time.
#
#     KIT=dir OUT=dir [BUDGET=540] bash eval/gpu/sprint.sh [arguments of sprint.py]
#
# KIT: a packed SGLang, which its unpack.sh puts under /tmp/site. Or SITE: a folder that holds SGLang
# and, if it needs one, env.sh. With neither, SGLang is installed. The call ends BUDGET seconds from
# its start. PYTHON: the interpreter.
set -u -o pipefail
export SPRINT_T0=$(date +%s.%N)
cd "$(dirname "$0")/../.." || exit 2
export OUT=${OUT:-$PWD/runs/sprint} PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-540}
mkdir -p "$OUT"
{ date -u; uname -a; nvidia-smi; df -h /tmp /dev/shm; free -g; nproc; ulimit -n
  echo "CUDA_HOME=${CUDA_HOME:-}"; command -v nvcc c++ ninja ip; } > "$OUT/env.txt" 2>&1
if [ -n "${KIT:-}" ]; then
  KIT=$(cd "$KIT" && pwd) || exit 2
  # torch's libraries are gigabytes on a cold disk: read them while the kit is unpacked.
  ($PYTHON - <<'P' | xargs -0 -P 8 -n 4 cat > /dev/null 2>&1) &
import glob, importlib.util as u, os
roots = [p for n in ("torch", "nvidia", "triton") if (s := u.find_spec(n)) for p in s.submodule_search_locations]
files = (f for r in roots for f in glob.glob(r + "/**/*.so*", recursive=True))
print("\0".join(f for f in files if os.path.getsize(f) > 1 << 20), end="")
P
  timeout 90 bash "$KIT/unpack.sh" /tmp/site || { echo "sprint: the kit cannot be unpacked"; exit 1; }
  SITE=/tmp/site
fi
if [ -n "${SITE:-}" ]; then
  SITE=$(cd "$SITE" && pwd) || exit 2
  if [ -f "$SITE/env.sh" ]; then . "$SITE/env.sh"; fi
fi
ulimit -n 65536 2>/dev/null || true
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${SITE:+:$SITE}${PYTHONPATH:+:$PYTHONPATH}
# Unpacking is part of the budget.
LEFT=$((BUDGET - ($(date +%s) - ${SPRINT_T0%.*})))
exec timeout --signal=TERM --kill-after=8 "$LEFT" "$PYTHON" -m eval.gpu.sprint --out "$OUT" \
  --budget "$BUDGET" ${KIT:+--kit "$KIT"} "$@"
