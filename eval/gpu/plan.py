"""What a sprint starts and measures: servers, methods, batch sizes; smaller in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.gpu.fleet import ServerSpec
from eval.gpu.speed import Method

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
CHAINS, TREES = (5, 1, 6), (4, 4, 16)

GATE = ("--c2t-policy", "c2t")
FIXED = ("--c2t-policy", "fixed", "--c2t-config", str(Path(__file__).with_name("fixed.json")))
FLASHINFER = ("--attention-backend", "flashinfer")
FLASHINFER_TREES = (*FLASHINFER, "--page-size", "1")
EAGER = ("--disable-cuda-graph",)
TRITON = ("--attention-backend", "triton", *EAGER)


@dataclass(frozen=True)
class Plan:
    """Sizes of a sprint.

    Attributes:
        big, little: Shapes of ``models.SHAPES``.
        batches: In the order of measuring.
        repeats: Numbers of the repeats; a short stage measures the first only.
        prompts, answers: Texts to measure on; the first of them are those whose answers are
            compared.
        flags: SGLang's, for all servers.
        new_tokens: The length of each answer; warm-up requests generate a third of them.
        pytest, pytest_seconds, microbench: What these commands are given.
    """

    big: str
    little: str
    batches: tuple[int, ...]
    answers_batches: tuple[int, ...]
    repeats: tuple[int, ...]
    prompts: int
    answers: int
    new_tokens: int
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
        itself: dict[str, Any] = {"shape": "", "batches": self.answers_batches}
        big: dict[str, Any] = {"shape": self.big, "batches": tuple(sorted(self.batches))}
        little = {**big, "shape": self.little}
        ours: dict[str, Any] = {"c2t": True, "drafts": CHAINS}
        trees: dict[str, Any] = {"c2t": True, "drafts": TREES, "flags": FLASHINFER_TREES}
        stock: dict[str, Any] = {"drafts": (3, 1, 4), "fallbacks": (FLASHINFER,)}
        found = [
            ServerSpec("answers-none", **itself, fallbacks=(FLASHINFER, TRITON)),
            ServerSpec("answers-chains", **itself, **ours, fallbacks=(FLASHINFER, EAGER)),
            ServerSpec("answers-trees", **itself, **trees, fallbacks=(EAGER,)),
            ServerSpec("none", **big, fallbacks=(FLASHINFER, TRITON)),
            ServerSpec("auto", **big, **ours, fallbacks=(FLASHINFER, EAGER)),
            ServerSpec("stock3", **big, **stock),
            ServerSpec("fixed", **big, **ours, flags=FIXED, fallbacks=(FLASHINFER,)),
            ServerSpec("little-none", **little, fallbacks=(FLASHINFER,)),
            ServerSpec("little-auto", **little, **ours, fallbacks=(FLASHINFER,)),
            ServerSpec("little-stock3", **little, **stock),
            ServerSpec("gate", **big, **ours, flags=GATE, fallbacks=(FLASHINFER,)),
            ServerSpec("trees", **big, **trees, fallbacks=(EAGER,)),
        ]
        return {spec.name: spec for spec in found}


#: What a Hopper GPU measures in ten minutes.
GPU = Plan(
    big="8b",
    little="1b",
    batches=(64, 256, 8, 1, 128, 32),
    answers_batches=(1, 16, 64),
    repeats=(0, 1),
    prompts=768,
    answers=64,
    new_tokens=96,
    context_length=1024,
    max_total_tokens=57344,
    mem_fraction=0.9,
    pytest=("-n", "4"),
    pytest_seconds=80,
    microbench=("--batches", "64", "256", "1"),
)

#: What an emulated device computes in minutes.
REHEARSAL = Plan(
    big="small128",
    little="small",
    batches=(4, 1),
    answers_batches=(1, 4),
    repeats=(0,),
    prompts=24,
    answers=4,
    new_tokens=24,
    context_length=256,
    max_total_tokens=2048,
    mem_fraction=0.5,
    pytest=("-k", "every_byte or shorter_than_a_byte"),
    pytest_seconds=120,
    microbench=("--batches", "2", "--brief"),
)
