# Read by eval/gpu/sprint.sh with SITE=tests/emulated/site, before it sets PYTHONPATH.
# What SGLang and its libraries read when they are imported: ENVIRONMENT of tests/emulated/serve.py.
export GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 FLASHINFER_USE_CUDA_NORM=1 \
  SGLANG_ENABLE_JIT_DEEPGEMM=0 SGLANG_HOST_IP=127.0.0.1 SGLANG_JIT_DEEPGEMM_PRECOMPILE=0 \
  SGLANG_USE_SGL_FA3_KERNEL=1 TQDM_DISABLE=1 TRITON_INTERPRET=1
# Of tests/cuda/test_servers.py: the least that has a control.
export GPU_TEST_BATCHES="1 2 4" GPU_TEST_TOKENS=16
