"""Recording trees inside a server: columns, labels, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_c2t.classifier.recording import MEASURED, Recording, RecordingWriter
from sglang_c2t.cpu.tree_verify import verify_tree
from sglang_c2t.draft.growth import TreeGrowth, node_margins
from sglang_c2t.policies.base import TreeLayer, TreeShape
from sglang_c2t.policies.eagle2 import EAGLE2
from sglang_c2t.srt import recorder
from sglang_c2t.tree import Trees, child_links
from tests.doubles import double
from tests.oracles import accepted_path
from tests.recordings import tree_origin
from tests.srt.test_recorder import request, written

VOCABULARY = 6


@dataclass(frozen=True)
class Step:
    """An exploring step of a server: what the draft proposed, and the target's choices."""

    layers: list[TreeLayer]
    trees: Trees
    target: torch.Tensor
    """[B, N] int64: behind each node."""

    rows: torch.Tensor
    """[B, N] int64: of the target's forward."""

    tokens: list[torch.Tensor]
    """[B, W * K] of each layer."""

    @property
    def flat_target(self) -> torch.Tensor:
        """[T]: the target's choices, row by row."""
        flat = torch.full((int(self.rows.max()) + self.target.shape[1],), VOCABULARY - 1)
        live = torch.arange(self.target.shape[1]) < self.trees.num_nodes[:, None]
        flat[self.rows[live]] = self.target[live]
        return flat

    def accepted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S] rows and [B] lengths, as the server's kernel finds them."""
        batch, width = self.rows.shape
        index = torch.full((batch, len(self.layers) + 1), -1, dtype=torch.int32)
        num_correct = torch.empty(batch, dtype=torch.int32)
        verify_tree(
            torch.zeros(batch * width, dtype=torch.int32), index, num_correct,
            self.trees.tokens, self.rows, *child_links(self.trees.parents), self.flat_target,
        )  # fmt: skip
        return index, num_correct + 1

    def result(self) -> Any:
        """The result of SGLang's verification."""
        _, lens = self.accepted()
        logits = torch.nn.functional.one_hot(self.flat_target, VOCABULARY).float()
        return double(
            "GenerationBatchResult",
            accept_lens=lens,
            logits_output=double("LogitsProcessorOutput", next_token_logits=logits),
        )


def explored(batch: int, shape: TreeShape, *, packed: bool = True, seed: int = 0) -> Step:
    """EAGLE-2's trees of a random draft; every measurement identifies its row."""
    generator = torch.Generator().manual_seed(seed)
    growth = TreeGrowth(EAGLE2(), shape, batch, "cpu")
    tokens = []
    for _ in range(shape.num_steps):
        width = growth.beams.tokens.shape[1]
        weights = torch.rand((batch, width, VOCABULARY), generator=generator)
        prob, token = weights.softmax(dim=2).sort(dim=2, descending=True)
        prob, token = prob[..., : shape.topk].contiguous(), token[..., : shape.topk].contiguous()
        row = torch.rand((batch * width,), generator=generator)
        measured = {
            "entropy": row,
            "entropy_top1000": row / 2,
            "margin": node_margins(prob.flatten(0, 1)),
            "hidden": torch.stack((row, -row), dim=1),
        }
        tokens.append(token.flatten(1))
        growth.add(token, prob, measured)
    trees = growth.finish()[0].rooted(torch.randint(VOCABULARY, (batch,), generator=generator))
    num_rows = (
        trees.num_nodes if packed else torch.full_like(trees.num_nodes, trees.tokens.shape[1])
    )
    target = torch.randint(VOCABULARY, trees.tokens.shape, generator=generator)
    return Step(growth.layers, trees, target, trees.retrieve_index(num_rows), tokens)


def add(of: Any, reqs: list[Any], step: Step, recordable: list[bool] | None = None) -> None:
    """Record the step as the worker does; positions are 100, 101, ..."""
    of.add_trees(
        double("ScheduleBatch", reqs=reqs, seq_lens=torch.arange(100, 100 + len(reqs))),
        step.layers,
        torch.tensor([True] * len(reqs) if recordable is None else recordable),
        step.trees,
        step.rows,
        step.accepted()[0],
        step.result(),
    )


def labels(read: Recording, draft: int) -> list[int]:
    return read.nodes["accept"][read.nodes["draft"] == draft].tolist()


SHAPES = st.builds(TreeShape, st.integers(2, 3), st.integers(1, 3), st.integers(1, 22))


# -- columns -------------------------------------------------------------------------------


@given(shape=SHAPES, seed=st.integers(0, 99), rows=st.permutations(range(3)), num=st.integers(1, 3))
def test_recorder_tree_nodes_hold_every_column(
    shape: TreeShape, seed: int, rows: list[int], num: int
) -> None:
    """Some of three requests, node by node from the layers' own tables."""
    step = explored(3, shape, seed=seed)
    accepted = torch.rand(step.trees.tokens.shape) < 0.5
    nodes = recorder.tree_nodes(
        step.layers, step.trees, torch.tensor(rows[:num]), accepted, [*MEASURED, "hidden"]
    )
    columns = {name: iter(values.tolist()) for name, values in nodes.items()}
    for draft, b in enumerate(rows[:num]):
        numbers: dict[int, tuple[int, int]] = {}  # candidate -> (layer, place in it)
        for depth, layer in enumerate(step.layers):
            for place in range(layer.joint[0].numel()):
                numbers[len(numbers)] = (depth, place)
        for node in range(1, int(step.trees.num_nodes[b])):
            depth, place = numbers[int(step.trees.source[b, node])]
            layer = step.layers[depth].nodes
            at = b * step.tokens[depth].shape[1] + place
            expected = {
                "draft": draft,
                "parent": int(step.trees.parents[b, node]) - 1,
                "rank": place % shape.topk,
                "depth": depth + 1,
                "accept": bool(accepted[b, node]),
                "prob": layer.prob[at].item(),
                "joint": layer.joint[at].item(),
                "entropy": layer.entropy[at].item(),
                **{n: layer.measured[n][at].tolist() for n in
                   ("margin", "entropy_top1000", "hidden")},
            }  # fmt: skip
            assert {name: next(column) for name, column in columns.items()} == expected
    assert all(next(column, None) is None for column in columns.values())


# -- labels --------------------------------------------------------------------------------


@given(shape=SHAPES, seed=st.integers(0, 999), packed=st.booleans())
def test_recorder_tree_labels_mark_the_accepted_path(
    shape: TreeShape, seed: int, packed: bool
) -> None:
    """The target's choices and the server's accepted drafts agree, packed or padded."""
    step = explored(3, shape, packed=packed, seed=seed)
    target = step.flat_target[step.rows]
    matched = recorder.matched_nodes(step.trees, target, len(step.layers))
    walked = recorder.walked_nodes(step.rows, *step.accepted())
    for b in range(3):
        live = int(step.trees.num_nodes[b])
        path = accepted_path(
            step.trees.parents[b, :live].tolist(),
            step.trees.tokens[b, :live].tolist(),
            step.target[b, :live].tolist(),
        )
        drafts = sorted(set(path) - {0})
        assert matched[b].nonzero().flatten().tolist() == drafts
        assert walked[b].nonzero().flatten().tolist() == [0, *drafts]


@pytest.mark.parametrize("every_position", [False, True])
def test_recorder_tree_step_is_recorded_with_its_labels(
    tmp_path: Path, every_position: bool
) -> None:
    """Record requests whose first layer was measured; with every root, greedy ones."""
    shape = TreeShape(2, 3, 14)  # of which 11 can be
    writer = RecordingWriter(tmp_path, origin=tree_origin(shape))
    of = recorder.Recorder(writer, every_position=every_position)
    reqs = [
        request("unmeasured", [1]),
        request("math/0", [1, 2]),
        request("sampled", [3], top_k=50),
        request("grammar", [3], grammar=object()),
        request("math/1", [3]),
    ]
    step = explored(5, shape, seed=3)
    add(of, reqs, step, recordable=[False, True, True, True, True])
    read = written(tmp_path, of, reqs)
    expected = [1, 4] if every_position else [1, 2, 3, 4]
    assert [read.requests[i] for i in read.drafts["request"]] == [reqs[b].rid for b in expected]
    assert read.drafts["position"].tolist() == [100 + b for b in expected]
    assert recorder.RECORDING.drafts == recorder.RECORDING.drafts_written == len(expected)
    _, lens = step.accepted()
    assert [sum(labels(read, draft)) for draft in range(len(expected))] == [
        int(lens[b]) - 1 for b in expected
    ]
    assert read.topk == 2
