"""The servers that the emulated device runs."""

from __future__ import annotations

from eval.server import TARGET, speculative_flags

COMMON = (
    "--model-path", str(TARGET), "--dtype", "float32", "--max-total-tokens", "4096",
    "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4", "--skip-tokenizer-init",
    "--mm-feature-transport", "cpu", "--grammar-backend", "none", "--disable-prefill-cuda-graph",
    "--random-seed", "1", "--mem-fraction-static", "0.5", "--watchdog-timeout", "100000",
)  # fmt: skip
FLASHINFER = ("--attention-backend", "flashinfer")
GATED = ("--c2t", "--c2t-policy", "c2t")
#: Of a chain, and of a tree with its root.
DRAFTS, NODES = 3, 8
CHAINS = {kind: speculative_flags(kind, DRAFTS) for kind in ("EAGLE3", "STANDALONE")}
TREES = speculative_flags("EAGLE3", 3, 4, NODES)

SERVERS: dict[str, tuple[str, ...]] = {
    "target alone, FA3": (),
    "EAGLE3 chains, FA3, stock": CHAINS["EAGLE3"],
    "EAGLE3 chains, FA3": (*CHAINS["EAGLE3"], "--c2t"),
    "EAGLE3 chains, FA3, gated": (*CHAINS["EAGLE3"], *GATED),
    "STANDALONE chains, FA3": (*CHAINS["STANDALONE"], "--c2t"),
    "EAGLE3 chains, FlashInfer": (*CHAINS["EAGLE3"], *FLASHINFER, "--c2t"),
    "EAGLE3 chains, FlashInfer, gated": (*CHAINS["EAGLE3"], *FLASHINFER, *GATED),
    "EAGLE3 trees, FlashInfer": (*TREES, *FLASHINFER, "--c2t"),
    "EAGLE3 trees, FlashInfer, gated": (*TREES, *FLASHINFER, *GATED),
}

#: The server of the same draft model that is SGLang's own.
STOCK = {"EAGLE3": "EAGLE3 chains, FA3, stock"}

#: SGLang reads seeds under this flag only.
SEEDED = ("--enable-deterministic-inference",)
SERVERS |= {
    f"{name}, seeded": (*SERVERS[name], *SEEDED)
    for name in ("target alone, FA3", "EAGLE3 chains, FA3", "EAGLE3 trees, FlashInfer")
}
