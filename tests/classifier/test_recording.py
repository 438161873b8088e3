"""Recordings: they come back as written, stay within their limit, and are never half right."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_c2t.classifier import recording as module
from sglang_c2t.classifier.features import CONVENTIONS
from sglang_c2t.classifier.recording import (
    DRAFT_COLUMNS,
    NODE_COLUMNS,
    RecordingFull,
    RecordingWriter,
    read_recording,
)
from sglang_c2t.classifier.request_names import name_requests, recorded_id
from sglang_c2t.config import ConfigError
from sglang_c2t.draft_layer import PLACES
from tests.recordings import (
    ORIGIN,
    Draft,
    chain,
    random_chains,
    random_trees,
    recording,
    tables,
    trees,
    write,
)
from tests.refusals import refused

CHAINS = random_chains(4, roots=3, depth=3)


@given(
    drafts=st.lists(trees(), min_size=1, max_size=9),
    shard_nodes=st.integers(1, 20),
    extra=st.sampled_from([(), ("topk_prob", "hidden"), ("entropy_top100",)]),
)
def test_recording_drafts_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    drafts: list[Draft],
    shard_nodes: int,
    extra: tuple[str, ...],
) -> None:
    """Trees of all shapes, over several shards; float16 only where the format says so."""
    directory = tmp_path_factory.mktemp("recording")
    writer = write(directory, drafts, shard_nodes=shard_nodes, extra=extra)
    read = read_recording(directory)
    assert writer.drafts_written == read.num_drafts == len(drafts)
    assert read.num_nodes == sum(len(draft.parents) for draft in drafts)
    wide = {"topk_prob": torch.float16, "hidden": torch.float16}
    types = NODE_COLUMNS | {name: wide.get(name, torch.float32) for name in extra}
    assert {name: column.dtype for name, column in read.nodes.items()} == types
    assert {name: read.drafts[name].dtype for name in DRAFT_COLUMNS} == DRAFT_COLUMNS
    assert len(set(read.requests)) == len(read.requests), "one request, though in two shards"
    node = 0
    for row, draft in enumerate(drafts):
        assert read.requests[read.drafts["request"][row]] == draft.request
        assert read.drafts["prompt"][row] == draft.prompt
        assert read.drafts["position"][row] == draft.position
        wanted = tables([draft])[0]
        for i in range(len(draft.parents)):
            assert read.nodes["draft"][node] == row
            for name in ("parent", "rank", "depth", "prob", "joint", "accept"):
                assert read.nodes[name][node] == wanted[name][i], name
            node += 1


def test_recording_leaves_out_a_column_that_one_shard_lacks(tmp_path: Path) -> None:
    write(tmp_path / "a", CHAINS, extra=("topk_prob", "hidden"))
    write(tmp_path / "b", CHAINS, extra=("topk_prob",))
    assert set(read_recording(tmp_path / "a", tmp_path / "b").nodes) == {*NODE_COLUMNS, "topk_prob"}


def test_recording_of_a_second_writer_overwrites_nothing(tmp_path: Path) -> None:
    """In a container, a server that starts again has the process id it had before."""
    write(tmp_path, CHAINS, shard_nodes=10)
    write(tmp_path, CHAINS, shard_nodes=10)
    assert read_recording(tmp_path).num_drafts == 2 * len(CHAINS)


def test_recording_request_id_of_two_origins_stays_two_requests(tmp_path: Path) -> None:
    draft = chain([0.5], [1], request="math/0")
    write(tmp_path / "a", [draft], origin={**ORIGIN, "target": "other"})
    write(tmp_path / "b", [draft, draft])
    read = read_recording(tmp_path / "a", tmp_path / "b")
    assert read.requests == ["math/0", "math/0"]
    assert read.drafts["request"].tolist() == [0, 1, 1]
    assert [read.origins[i]["target"] for i in read.drafts["origin"]] == ["other", "t", "t"]


def test_recording_names_file_restores_request_names(tmp_path: Path) -> None:
    """Group known requests by their names."""
    ids = [recorded_id(rid, "ab") for rid in ("math/0", "a client's", "math/1")]
    write(tmp_path, [chain([0.5], [1], request=rid) for rid in ids])
    assert read_recording(tmp_path).requests == ids
    name_requests(tmp_path, "ab", ["math/0", "math/1"])
    read = read_recording(tmp_path)
    assert read.requests == ["math/0", ids[1], "math/1"]
    assert read.groups() == ["math", ids[1], "math"]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\xff"])
def test_recording_names_file_that_is_broken_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, [chain([0.5], [1])])
    (tmp_path / "names-1.json").write_text(text, encoding="latin-1")
    with refused("names-1.json"):
        read_recording(tmp_path)


@given(
    case=st.lists(trees(), min_size=1, max_size=8).flatmap(
        lambda drafts: st.tuples(
            st.just(drafts), st.lists(st.booleans(), min_size=len(drafts), max_size=len(drafts))
        )
    )
)
def test_recording_selection_equals_recording_the_selected(
    case: tuple[list[Draft], list[bool]],
) -> None:
    """As if only the selected drafts had been recorded."""
    drafts, mask = case
    selected = recording(drafts).select(torch.tensor(mask))
    kept = [draft for draft, keep in zip(drafts, mask, strict=True) if keep]
    expected = tables(kept)[0]
    for name in ("draft", "parent", "rank", "depth", "accept", "prob", "joint"):
        assert selected.nodes[name].tolist() == expected[name].tolist(), name
    assert [selected.requests[i] for i in selected.drafts["request"]] == [d.request for d in kept]
    assert selected.drafts["position"].tolist() == [d.position for d in kept]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**16))
def test_recording_places_are_those_of_eagle2(topk: int, steps: int, seed: int) -> None:
    """Draft by draft and layer by layer: the most likely K are forwarded, of equals the first."""
    grown = recording(random_trees(2, 3, topk=topk, num_steps=steps, seed=seed))
    places = grown.layer(PLACES).measured
    nodes, parents = grown.nodes, grown.parent_rows().tolist()
    assert places["rank"].tolist() == nodes["rank"].tolist()
    for draft in range(grown.num_drafts):
        rows = [n for n in range(grown.num_nodes) if nodes["draft"][n] == draft]
        beams = [-1]
        for depth in range(1, steps + 1):
            layer = [n for n in rows if nodes["depth"][n] == depth]
            found = [int(places["parent_rank"][n]) for n in layer]
            assert found == [beams.index(parents[n]) for n in layer]
            beams = sorted(layer, key=lambda n: -float(nodes["joint"][n]))[:topk]


def test_recording_layer_without_a_column_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks hidden"):
        recording(CHAINS).layer({"hidden", "rank"})


# -- the disk -----------------------------------------------------------------------------


def test_recording_at_its_limit_stays_readable(tmp_path: Path) -> None:
    """The limit may be passed by one shard, not by two."""
    with pytest.raises(RecordingFull, match=r"MB, the limit is 0 MB"):
        write(tmp_path, CHAINS * 20, limit_bytes=5000, shard_nodes=30)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) - max(sizes) < 5000 <= sum(sizes)
    assert read_recording(tmp_path).num_drafts == 10 * len(sizes)


def test_recording_limit_counts_other_writers(tmp_path: Path) -> None:
    first, second = (RecordingWriter(tmp_path, origin=ORIGIN, limit_bytes=10) for _ in range(2))
    first.add(*tables(CHAINS))
    first.flush()
    second.add(*tables(CHAINS))
    with pytest.raises(RecordingFull):
        second.flush()


def test_recording_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the drafts stay in memory: once there is room again, they are written."""

    def half_a_save(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"some bytes")
        raise OSError(28, "No space left on device")

    writer = RecordingWriter(tmp_path, origin=ORIGIN)
    writer.add(*tables(CHAINS))
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", half_a_save)
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
    assert list(tmp_path.iterdir()) == []
    assert writer.drafts_written == 0
    writer.flush()
    assert read_recording(tmp_path).num_drafts == len(CHAINS)


# -- refusals -----------------------------------------------------------------------------


def test_recording_directory_without_shards_is_refused(tmp_path: Path) -> None:
    """Also beside one that has a recording: a mistyped name must not pass unseen."""
    write(tmp_path / "full", CHAINS)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        for others in ([], [tmp_path / "full"]):
            with refused(f"no recording in {tmp_path / name}: no *.safetensors shard found"):
                read_recording(*others, tmp_path / name)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as shard:
        return dict(shard.metadata())


def without(name: str) -> Callable[[Path], None]:
    """A spoiler: drops a column, or a key of the metadata."""

    def spoil(path: Path) -> None:
        tensors, metadata = load_file(path), metadata_of(path)
        tensors.pop(name, None)
        metadata.pop(name, None)
        save_file(tensors, path, metadata)

    return spoil


def saying(**metadata: str) -> Callable[[Path], None]:
    """A spoiler: changes the metadata."""
    return lambda path: save_file(load_file(path), path, metadata_of(path) | metadata)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot read recording shard"),
        (lambda path: save_file(load_file(path), path), "is not a c2t recording"),
        (saying(format="c2t-classifier"), "is not a c2t recording"),
        (without("version"), "has recording format 1, this version reads 2; record again"),
        (without("margin"), "lacks the columns margin"),
        (without("draft.prompt"), "lacks the columns draft.prompt"),
        (without("roots"), "cannot read recording shard"),
        (saying(origin="{"), "cannot read recording shard"),
        (saying(features="{}"), "was written by another version"),
        (saying(roots="every"), "holds roots of kind every, the others visited"),
        (
            saying(features=json.dumps(CONVENTIONS.to_card() | {"entropy_unit": "bit"})),
            "was measured otherwise than this version measures: entropy_unit 'bit' (here: 'nat')",
        ),
        (saying(origin='{"draft": "e"}'), "recorded with another pair of models (algorithm None, "),
    ],
)
def test_recording_shard_that_is_invalid_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    write(tmp_path, CHAINS, shard_nodes=10)
    path = max(tmp_path.iterdir())
    spoil(path)
    with refused(said, str(path)):
        read_recording(tmp_path)


def test_recording_of_two_drafts_is_mixed_on_request_only(tmp_path: Path) -> None:
    write(tmp_path, CHAINS)
    write(tmp_path, CHAINS, origin={**ORIGIN, "draft": "another"})
    with refused("another pair of models (draft another, not d)"):
        read_recording(tmp_path)
    read = read_recording(tmp_path, mix_drafts=True)
    assert [origin["draft"] for origin in read.origins] == ["d", "another"]
    assert read.num_drafts == 2 * len(CHAINS)
    write(tmp_path, CHAINS, roots="every")
    with refused("holds roots of kind every, the others visited"):
        read_recording(tmp_path, mix_drafts=True)


@pytest.mark.parametrize(
    ("renamed", "weights", "said"),
    [
        ("e", {"target": "1", "draft": "2"}, None),
        ("d", {"target": "1", "draft": "3"}, "(weights {'draft': '3', 'target': '1'}, not {"),
        ("d", {"target": "4", "draft": "2"}, "(weights {'draft': '2', 'target': '4'}, not {"),
        ("d", None, None),  # of a version that said nothing of weights
        ("e", None, "(draft e, not d)"),
    ],
)
def test_recording_pair_is_compared_by_weights(
    tmp_path: Path, renamed: str, weights: dict[str, str] | None, said: str | None
) -> None:
    write(tmp_path / "a", CHAINS, origin={**ORIGIN, "weights": {"target": "1", "draft": "2"}})
    write(tmp_path / "b", CHAINS, origin={**ORIGIN, "draft": renamed, "weights": weights})
    if said is None:
        assert len(read_recording(tmp_path / "a", tmp_path / "b").origins) == 2
    else:
        with refused(f"another pair of models {said}"):
            read_recording(tmp_path / "a", tmp_path / "b")
