"""The servers that the emulated device runs."""

from __future__ import annotations

from eval.server import TARGET, speculative_flags

COMMON = (
    "--model-path", str(TARGET), "--dtype", "float32", "--max-total-tokens", "4096",
    "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4",
    "--mm-feature-transport", "cpu", "--disable-prefill-cuda-graph",
    "--random-seed", "1", "--mem-fraction-static", "0.5", "--watchdog-timeout", "100000",
)  # fmt: skip
FLASHINFER = ("--attention-backend", "flashinfer")
GATED = ("--c2t", "--c2t-policy", "c2t")
#: Of a chain, and of a tree with its root.
DRAFTS, NODES = 3, 8
CHAINS = {kind: speculative_flags(kind, DRAFTS) for kind in ("EAGLE3", "STANDALONE")}
TREES = speculative_flags("EAGLE3", 3, 4, NODES)

#: A planner that draws plans: uniform steps and others, of every number of layers.
ANY_PLAN, POLICIES = ("--c2t", "--c2t-policy"), "tests.e2e.server_policies"

SERVERS: dict[str, tuple[str, ...]] = {
    "target alone, FA3": (),
    "EAGLE3 chains, FA3, stock": CHAINS["EAGLE3"],
    "EAGLE3 chains, FA3": (*CHAINS["EAGLE3"], "--c2t"),
    "EAGLE3 chains, FA3, gated": (*CHAINS["EAGLE3"], *GATED),
    "STANDALONE chains, FA3, any plan": (
        *CHAINS["STANDALONE"], *ANY_PLAN, f"{POLICIES}:AnyJoint",
    ),
    "EAGLE3 chains, FlashInfer, any plan": (
        *CHAINS["EAGLE3"], *FLASHINFER, *ANY_PLAN, f"{POLICIES}:AnyJoint",
    ),
    "EAGLE3 chains, FlashInfer, gated": (*CHAINS["EAGLE3"], *FLASHINFER, *GATED),
    "EAGLE3 chains, FA3, any plan": (*CHAINS["EAGLE3"], *ANY_PLAN, f"{POLICIES}:AnyJoint"),
    "EAGLE3 trees, FlashInfer": (*TREES, *FLASHINFER, "--c2t"),
    "EAGLE3 trees, FlashInfer, any plan": (
        *TREES, *FLASHINFER, *ANY_PLAN, f"{POLICIES}:AnyTrees",
    ),
    "EAGLE3 trees, FlashInfer, gated": (*TREES, *FLASHINFER, *GATED),
}  # fmt: skip

#: Beside what the others do: rounding, pages that drafts share with what was accepted, and eager
#: drafts that are recorded behind every token (the folder is the test's).
ROUNDED = ("--dtype", "bfloat16")
PAGES = ("--page-size", "16")
RECORDED = ("--c2t-record-roots", "every", "--c2t-record")
TWO_RANKS = ("--tp-size", "2", "--disable-custom-all-reduce")
UNUSUAL = {
    "EAGLE3 chains, FA3, two ranks": (*CHAINS["EAGLE3"], "--c2t", *TWO_RANKS),
    "EAGLE3 trees, FlashInfer, gated, two ranks": (*TREES, *FLASHINFER, *GATED, *TWO_RANKS),
    "EAGLE3 chains, FA3, gated, bfloat16, pages": (*CHAINS["EAGLE3"], *GATED, *ROUNDED, *PAGES),
    "EAGLE3 trees, FlashInfer, bfloat16, pages": (*TREES, *FLASHINFER, "--c2t", *ROUNDED, *PAGES),
    "EAGLE3 chains, FA3, pages, recorded": (*CHAINS["EAGLE3"], *PAGES, "--c2t", *RECORDED),
    "EAGLE3 trees, FlashInfer, recorded": (*TREES, *FLASHINFER, "--c2t", *RECORDED),
}

#: A verification of full drafts.
UNUSUAL["EAGLE3 chains, FA3, static"] = (*CHAINS["EAGLE3"], *GATED, "--c2t-verify", "static")
#: What a user types at least, of drafts of as many layers as are chosen for him.
SHORTEST = "EAGLE3 chains, FA3, shortest command"
UNUSUAL[SHORTEST] = (*CHAINS["EAGLE3"][:4], "--c2t")

#: With a target of latent attention (MLA), which FlashInfer has no float32 kernel for. The expert
#: that is shared is one of the others, as it is in DeepSeek-V3: beside them SGLang's graphs read it
#: from what the others write.
LATENT_CHAINS = (
    *speculative_flags("NEXTN", DRAFTS), *FLASHINFER, *ROUNDED, "--enforce-shared-experts-fusion",
)  # fmt: skip
LATENT = {
    "NEXTN chains, FlashInfer": (*LATENT_CHAINS, "--c2t"),
    "NEXTN chains, FlashInfer, gated": (*LATENT_CHAINS, *GATED),
    "NEXTN chains, FlashInfer, gated, few in graphs": (
        *LATENT_CHAINS, *GATED, "--cuda-graph-max-bs-decode", "2",
    ),
}  # fmt: skip

#: The server of the same draft model that is SGLang's own.
STOCK = {"EAGLE3": "EAGLE3 chains, FA3, stock"}

#: SGLang reads seeds under this flag only.
SEEDED = ("--enable-deterministic-inference",)
SERVERS |= {
    f"{name}, seeded": (*SERVERS[name], *SEEDED)
    for name in ("target alone, FA3", "EAGLE3 chains, FA3", "EAGLE3 trees, FlashInfer")
}
