"""The servers, methods and batch sizes of a sprint, on a GPU and on an emulated device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.gpu.fleet import ServerSpec
from eval.gpu.measure import Method

STAGES = ("kernels", "answers", "first", "second", "micro", "little", "rest")

#: Methods of the stages first and second. A server is started for ``auto`` and switched to
#: ``c2t-plus`` afterwards, then back.
BIG = (
    Method("none", "none"),
    Method("auto", "auto", plans=True),
    Method("stock fixed 3", "stock3"),
    Method("c2t-plus", "auto", {"policy": "c2t-plus"}),
    *(
        Method(f"packed fixed {n}", "fixed", {"policy": "fixed", "policy_options": {"length": n}})
        for n in (3, 5, 1)
    ),
)
AUTO_AGAIN = Method("auto after c2t-plus", "auto", {"policy": "auto"}, plans=True)
LITTLE = (
    Method("none", "little-none"),
    Method("auto", "little-auto", plans=True),
    Method("stock fixed 3", "little-stock3"),
)
REST = (Method("c2t", "gate"), Method("trees, auto", "trees", plans=True))

#: Steps, topk and tokens.
CHAINS, TREES, STOCK = (5, 1, 6), (4, 4, 16), (3, 1, 4)

FIXED = ("--c2t-policy", "fixed", "--c2t-config", str(Path(__file__).with_name("fixed.json")))
FLASHINFER = ("--attention-backend", "flashinfer")
EAGER = ("--disable-cuda-graph",)
TRITON = ("--attention-backend", "triton", *EAGER)


@dataclass(frozen=True)
class Plan:
    """Sizes of a sprint."""

    big: str  # shapes of models.SHAPES
    little: str
    batches: tuple[int, ...]  # in the order of measuring
    answers_batches: tuple[int, ...]
    repeats: tuple[int, ...]  # a short stage measures the first only
    prompts: int
    answers: int  # the first prompts, whose answers are compared
    new_tokens: int  # of each answer; warm-up requests generate a third of them
    context_length: int
    max_total_tokens: int
    mem_fraction: float
    pytest: tuple[str, ...]
    pytest_seconds: float
    microbench: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of all servers. FA3 is SGLang's own choice on Hopper but for trees."""
        return (
            "--dtype", "bfloat16", "--context-length", str(self.context_length),
            "--mem-fraction-static", str(self.mem_fraction),
            "--max-total-tokens", str(self.max_total_tokens), "--attention-backend", "fa3",
            # Prompts are never shared and prefill is not measured, so nothing else needs to run.
            "--disable-radix-cache", "--grammar-backend", "none", "--disable-prefill-cuda-graph",
            "--mm-feature-transport", "cpu",  # the default reserves 1 GiB of GPU memory for images
            "--log-level-http", "warning",
        )  # fmt: skip

    def servers(self) -> dict[str, ServerSpec]:
        """All servers by name."""
        itself = ("", self.answers_batches)
        big, little = ((name, tuple(sorted(self.batches))) for name in (self.big, self.little))
        ours: dict[str, Any] = {"c2t": True, "drafts": CHAINS}
        trees: dict[str, Any] = {"c2t": True, "drafts": TREES, "fallbacks": (EAGER,),
                                 "flags": (*FLASHINFER, "--page-size", "1")}  # fmt: skip
        other, none = (FLASHINFER,), (FLASHINFER, TRITON)
        found = [
            ServerSpec("answers-none", *itself, fallbacks=none),
            ServerSpec("answers-chains", *itself, **ours, fallbacks=(FLASHINFER, EAGER)),
            ServerSpec("answers-trees", *itself, **trees),
            ServerSpec("none", *big, fallbacks=none),
            ServerSpec("auto", *big, **ours, fallbacks=(FLASHINFER, EAGER)),
            ServerSpec("stock3", *big, drafts=STOCK, fallbacks=other),
            ServerSpec("fixed", *big, **ours, flags=FIXED, fallbacks=other),
            ServerSpec("little-none", *little, fallbacks=other),
            ServerSpec("little-auto", *little, **ours, fallbacks=other),
            ServerSpec("little-stock3", *little, drafts=STOCK, fallbacks=other),
            ServerSpec("gate", *big, **ours, flags=("--c2t-policy", "c2t"), fallbacks=other),
            ServerSpec("trees", *big, **trees),
        ]
        return {spec.name: spec for spec in found}


#: Ten minutes on a Hopper GPU.
GPU = Plan(
    big="8b", little="1b", batches=(64, 256, 8, 1, 128, 32), answers_batches=(1, 16, 64),
    repeats=(0, 1), prompts=768, answers=64, new_tokens=96, context_length=1024,
    max_total_tokens=57344, mem_fraction=0.9, pytest=("-n", "4"), pytest_seconds=80,
    microbench=("--batches", "64", "256", "1"),
)  # fmt: skip

#: Minutes on an emulated device.
EMULATED = Plan(
    big="small128", little="small", batches=(4, 1), answers_batches=(1, 4), repeats=(0,),
    prompts=24, answers=4, new_tokens=24, context_length=256, max_total_tokens=2048,
    mem_fraction=0.5, pytest=("-k", "every_byte or shorter_than_a_byte"), pytest_seconds=120,
    microbench=("--batches", "2", "--brief"),
)  # fmt: skip
