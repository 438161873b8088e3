"""Recorded drafts on disk: every drafted token's features and whether it was accepted.

A recording is a directory of numbered ``safetensors`` shards. A shard holds two tables. One row of
the *draft* table is one verification of one request:

    draft.request    int32    index into the shard's list of request ids
    draft.prompt     int64    checksum of the prompt's token ids; splits use it
    draft.position   int32    tokens before the root, prompt included

One row of the *node* table is one drafted token. Drafts are consecutive, parents come before
children, so a chain of D tokens is D rows with parents -1, 0, 1, ...:

    draft                int32    row of the draft table
    parent               int16    index of the parent among the draft's nodes, -1 for the root
    rank                 uint8    rank among the parent's candidates, 0 the most likely
    depth                uint8    1 for children of the root
    prob                 float32  the token's own draft probability
    joint                float32  P, product of ``prob`` along the path
    entropy              float32  H in nats, whole vocabulary
    entropy_top1000      float32  H over the 1000 largest probabilities, the paper's
    margin               float32  log q of the best token less that of the second best
    accept               uint8    1 if the target accepts the token; 0 after a rejection

and the policy's own measurements, by name: float32 if scalar, otherwise float16. A shard's metadata
holds the format's version, the conventions of measurement (:class:`FeatureSpec`), and the models by
name and by ``weights`` (:mod:`~sglang_c2t.classifier.pair`). It also holds the drafts' shape
(``origin``; its ``topk`` is 1 for chains) and the request ids. These are keyed hashes, because the
clients' ids may hold anything; ``request_names.py`` restores them. ``roots`` is one of::

    visited     roots that the server verified from, full drafts
    every       one root per generated token, to replay policies: for chains any of them exactly,
                for trees see ``eval/tables/tree_replay.py``

Reading refuses to mix formats, conventions, kinds of roots, or two pairs of models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_c2t.checks import ConfigError, format_error, is_whole, parse_json, shown
from sglang_c2t.classifier.features import CONVENTIONS, FeatureSpec
from sglang_c2t.classifier.pair import pair_in
from sglang_c2t.classifier.request_names import names_in
from sglang_c2t.classifier.tensors import require_safetensors
from sglang_c2t.draft_layer import PLACES, DraftLayer
from sglang_c2t.files import write_whole

FORMAT = "c2t-recording"
VERSION = 2

DRAFT_COLUMNS = {
    "request": torch.int32,
    "prompt": torch.int64,
    "position": torch.int32,
}
NODE_COLUMNS = {
    "draft": torch.int32,
    "parent": torch.int16,
    "rank": torch.uint8,
    "depth": torch.uint8,
    "prob": torch.float32,
    "joint": torch.float32,
    "entropy": torch.float32,
    "entropy_top1000": torch.float32,
    "margin": torch.float32,
    "accept": torch.uint8,
}
#: Measured for every recorded node, beyond probability and entropy.
MEASURED = frozenset({"entropy_top1000", "margin"})

#: Most columns of a policy's own measurements, and their names.
MOST_OWN = 16
OWN_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

SHARD_NODES = 65_536

ROOTS = ("visited", "every")

#: Most bytes of a shard, and of its header, which holds the names of its requests.
LARGEST_SHARD = 1 << 32
LARGEST_HEADER = 1 << 24

#: Largest probability, with float32 rounding.
MOST_PROB = 1.001


@dataclass(frozen=True)
class Recording:
    """Drafts and their nodes, in memory. ``nodes["draft"]`` indexes the rows of ``drafts``;
    ``drafts["request"]`` indexes ``requests``, ``drafts["origin"]`` indexes ``origins``.
    """

    nodes: dict[str, Tensor]
    drafts: dict[str, Tensor]
    requests: list[str]
    origins: list[dict[str, Any]]
    roots: str

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens."""
        return self.nodes["draft"].numel()

    @property
    def num_drafts(self) -> int:
        """Number of verifications."""
        return self.drafts["request"].numel()

    @property
    def topk(self) -> int:
        """Most children offered per node over all origins; 1 for chains."""
        return max((int(origin.get("topk") or 1) for origin in self.origins), default=1)

    def layer(self, needs: Collection[str] = ()) -> DraftLayer:
        """Return all nodes as one layer whose depth is a tensor, for a classifier.
        :class:`ConfigError` if one of the measurements it ``needs`` was not recorded.
        """
        extra = set(self.nodes) - set(NODE_COLUMNS) | MEASURED
        if missing := sorted(set(needs) - extra - PLACES):
            raise ConfigError(
                f"this recording lacks {', '.join(missing)}: record again with a policy that "
                "measures it"
            )
        return DraftLayer(
            depth=self.nodes["depth"].float(),
            prob=self.nodes["prob"],
            joint=self.nodes["joint"],
            entropy=self.nodes["entropy"],
            alive=torch.ones(self.num_nodes, dtype=torch.bool),
            measured={name: self.nodes[name] for name in extra}
            | {name: self._place(name) for name in PLACES.intersection(needs)},
        )

    def _place(self, name: str) -> Tensor:
        """[num_nodes] float32: see :attr:`DraftLayer.measured`. Forwarded rows are ranked by
        falling joint probability, of equal ones the first.
        """
        if name == "rank":
            return self.nodes["rank"].float()
        parents = self.parent_rows()
        forwarded = parents[parents >= 0].unique()  # increasing, layer by layer
        layer = self.nodes["draft"].long()[forwarded] * 256 + self.nodes["depth"][forwarded]
        order = self.nodes["joint"][forwarded].argsort(descending=True, stable=True)
        order = order[layer[order].argsort(stable=True)]
        first = torch.searchsorted(layer, layer)
        place = torch.zeros(self.num_nodes)
        place[forwarded[order]] = (torch.arange(len(order)) - first).float()
        return place[parents.clamp(min=0)].masked_fill(parents < 0, 0.0)

    def parent_rows(self) -> Tensor:
        """[num_nodes] int64: the row of each token's parent, -1 for children of the root."""
        draft, parent = self.nodes["draft"].contiguous(), self.nodes["parent"].long()
        first = torch.searchsorted(draft, draft)  # row of the first node of the same draft
        return torch.where(parent < 0, -1, first + parent)

    def select(self, drafts: Tensor) -> Recording:
        """Return the drafts selected by a [num_drafts] bool mask."""
        new_index = drafts.long().cumsum(0) - 1
        of_node = self.nodes["draft"].long()
        nodes = {name: column[drafts[of_node]] for name, column in self.nodes.items()}
        nodes["draft"] = new_index[nodes["draft"].long()].to(torch.int32)
        kept = {name: column[drafts] for name, column in self.drafts.items()}
        return replace(self, nodes=nodes, drafts=kept)

    def groups(self) -> list[str]:
        """Return per request its id up to the last slash, or the full id without one.

        ``sglang_c2t record`` puts the task there.
        """
        return [rid.rsplit("/", 1)[0] for rid in self.requests]


def require_finite(values: Tensor) -> None:
    """Raise :class:`ConfigError` unless all recorded values of each token [n, any] are finite."""
    broken = ~torch.isfinite(values).all(dim=1)
    if bool(broken.any()):
        raise ConfigError(
            f"{int(broken.sum())} of {len(broken)} recorded tokens hold values that are not "
            "finite; record again, or delete their shards"
        )


class RecordingWriter:
    """Collects drafts in memory and writes a shard per ``shard_nodes`` nodes.

    Args:
        directory: Created if missing.
        origin: Names of models and settings, for each shard's metadata.
        roots: ``"visited"`` or ``"every"``.
        limit_bytes: Size of the directory from which :meth:`flush` raises :class:`RecordingFull`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        origin: dict[str, Any],
        roots: str = "visited",
        limit_bytes: int | None = None,
        shard_nodes: int = SHARD_NODES,
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "features": json.dumps(CONVENTIONS.to_card(), sort_keys=True),
            "origin": json.dumps(origin, sort_keys=True),
            "roots": roots,
        }
        self._limit_bytes = limit_bytes
        self._shard_nodes = shard_nodes
        self._num_shards = 0
        self.drafts_written = 0
        """Drafts that are on the disk."""
        self._clear()

    def add(self, nodes: dict[str, Tensor], drafts: dict[str, Tensor], requests: list[str]) -> None:
        """Append drafts. ``drafts`` has the documented columns without ``request``; ``requests``
        has the ids. ``nodes["draft"]`` counts from 0 in each call. ``nodes`` may hold further
        columns, always the same.
        """
        index = [self._requests.setdefault(rid, len(self._requests)) for rid in requests]
        drafts = drafts | {"request": torch.tensor(index, dtype=torch.int32)}
        nodes = nodes | {"draft": nodes["draft"] + self._num_drafts}
        self._drafts.append({name: drafts[name].to(t) for name, t in DRAFT_COLUMNS.items()})
        names = dict.fromkeys((*NODE_COLUMNS, *nodes))
        self._nodes.append({name: nodes[name].to(_dtype(name, nodes[name])) for name in names})
        self._num_drafts += len(requests)
        self._num_nodes += nodes["draft"].numel()
        if self._num_nodes >= self._shard_nodes:
            self.flush()

    def flush(self) -> None:
        """Write the drafts in memory as one shard, atomically."""
        if not self._num_nodes:
            return
        if self._limit_bytes is not None and (held := self._held()) >= self._limit_bytes:
            raise RecordingFull(
                f"{self._directory} holds {held / 1e6:.0f} MB, the limit is "
                f"{self._limit_bytes / 1e6:.0f} MB"
            )
        tensors = {name: torch.cat([n[name] for n in self._nodes]) for name in self._nodes[0]}
        for name in DRAFT_COLUMNS:
            tensors[f"draft.{name}"] = torch.cat([d[name] for d in self._drafts])
        metadata = self._metadata | {"requests": json.dumps(list(self._requests))}
        path = self._next_shard()
        write_whole({path: lambda tmp: save_file(tensors, tmp, metadata=metadata)})
        self.drafts_written += self._num_drafts
        self._clear()

    def _held(self) -> int:
        """Return the bytes of all shards in the directory, those of other schedulers included."""
        return sum(path.stat().st_size for path in self._directory.glob("shard-*.safetensors"))

    def _next_shard(self) -> Path:
        """Return an unused name. The process id separates two servers with one directory. In
        containers a restarted server often has the same id.
        """
        while True:
            path = self._directory / f"shard-{os.getpid()}-{self._num_shards:05d}.safetensors"
            self._num_shards += 1
            if not path.exists():
                return path

    def _clear(self) -> None:
        self._nodes: list[dict[str, Tensor]] = []
        self._drafts: list[dict[str, Tensor]] = []
        self._requests: dict[str, int] = {}
        self._num_nodes = self._num_drafts = 0


def _dtype(name: str, column: Tensor) -> torch.dtype:
    """Return the dtype in which a node column is stored."""
    return NODE_COLUMNS.get(name, torch.float32 if column.dim() == 1 else torch.float16)


class RecordingFull(OSError):
    """The recording has reached its limit on disk."""


def read_recording(*directories: str | os.PathLike[str], mix_drafts: bool = False) -> Recording:
    """Read all drafts of one or several recordings. Raises :class:`ConfigError`, one line, for a
    missing, corrupt or mixed recording. ``mix_drafts`` admits several pairs, for a classifier that
    serves them all.
    """
    paths: list[Path] = []
    names: dict[str, str] = {}
    for directory in directories:
        shards = sorted(Path(directory).glob("*.safetensors"))
        if not shards:
            raise ConfigError(f"no recording in {directory}: no *.safetensors shard found")
        paths += shards
        names |= names_in(Path(directory))
    nodes: list[dict[str, Tensor]] = []
    drafts: list[dict[str, Tensor]] = []
    origins: list[dict[str, Any]] = []
    requests: dict[tuple[int, str], int] = {}
    roots = ""
    for path in paths:
        tensors, metadata = _read_shard(path)
        if roots and metadata["roots"] != roots:
            raise ConfigError(f"{path} holds roots of kind {metadata['roots']}, the others {roots}")
        roots = metadata["roots"]
        origin = metadata["origin"]
        if origin not in origins:
            origins.append(origin)
        if not mix_drafts and (other := _other_pair(origin, origins[0])):
            raise ConfigError(
                f"{path} was recorded with another pair of models ({other}); a classifier is "
                "trained for one: keep the recordings apart, or add --mix-drafts"
            )
        here = origins.index(origin)
        rids = [names.get(rid, rid) for rid in metadata["requests"]]
        index = torch.tensor([requests.setdefault((here, r), len(requests)) for r in rids])
        draft = {name: tensors[f"draft.{name}"] for name in DRAFT_COLUMNS}
        tensors = {name: t for name, t in tensors.items() if not name.startswith("draft.")}
        draft["request"] = index[draft["request"].long()].to(torch.int32)
        draft["origin"] = torch.full_like(draft["request"], here)
        tensors["draft"] = tensors["draft"] + sum(d["request"].numel() for d in drafts)
        nodes.append(tensors)
        drafts.append(draft)
    # Widths of hidden states may differ between draft models; columns that not all have are
    # dropped.
    shapes = [{name: column.shape[1:] for name, column in shard.items()} for shard in nodes]
    common = {
        name for name, shape in shapes[0].items() if all(s.get(name) == shape for s in shapes)
    }
    return Recording(
        nodes={name: torch.cat([shard[name] for shard in nodes]) for name in sorted(common)},
        drafts={name: torch.cat([d[name] for d in drafts]) for name in drafts[0]},
        requests=[rid for _, rid in requests],
        origins=origins,
        roots=roots,
    )


def _other_pair(origin: dict[str, Any], first: dict[str, Any]) -> str | None:
    """Return the difference between two pairs, empty if they are equal. It compares weights, or the
    draft's name if the weights of one are unknown.
    """
    known = all(pair_in(one) is not None for one in (origin, first))
    keys = ("algorithm", "weights" if known else "draft")
    differing = [key for key in keys if origin.get(key) != first.get(key)]
    return ", ".join(f"{key} {origin.get(key)}, not {first.get(key)}" for key in differing)


def _read_shard(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the columns, and ``roots``, ``origin`` and ``requests`` of the metadata."""
    required = {*NODE_COLUMNS, *(f"draft.{name}" for name in DRAFT_COLUMNS)}
    try:
        require_safetensors(path, largest=LARGEST_SHARD, largest_header=LARGEST_HEADER)
        with safe_open(path, framework="pt") as shard:
            metadata = shard.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ConfigError(f"{path} is not a c2t recording")
            if metadata.get("version") != str(VERSION):
                raise ConfigError(
                    f"{path} has recording format {shown(metadata.get('version', '1'))[1:-1]}, "
                    f"this version reads {VERSION}; record again"
                )
            names = set(shard.keys())
            if missing := required - names:
                raise ConfigError(f"{path} lacks the columns {', '.join(sorted(missing))}")
            own = names - required
            if len(own) > MOST_OWN:
                raise ConfigError(f"{path} holds {len(own)} columns beyond the format's")
            if unknown := sorted(name for name in own if not OWN_NAME.fullmatch(name)):
                raise ConfigError(f"{path} holds unknown columns: {shown(unknown)}")
            tensors = {name: shard.get_tensor(name) for name in names}
        FeatureSpec.from_card(_parsed(metadata["features"], path), source=str(path))
        found = {name: _parsed(metadata[name], path) for name in ("origin", "requests")}
        found["roots"] = metadata["roots"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"cannot read recording shard {path}: {format_error(error)}") from error
    if defect := _defect(found) or _defect_of(tensors, len(found["requests"])):
        raise ConfigError(f"cannot read recording shard {path}: {defect}")
    return tensors, found


def _parsed(text: str, path: Path) -> Any:
    return parse_json(text, source=f"cannot read recording shard {path}: its metadata")


def _defect(metadata: dict[str, Any]) -> str | None:
    """Return the defect of a shard's metadata; ``None`` if there is none."""
    origin, requests = metadata["origin"], metadata["requests"]
    if not isinstance(requests, list) or not all(isinstance(rid, str) for rid in requests):
        return "its requests must be a list of names"
    if not isinstance(origin, dict) or not is_whole(origin.get("topk") or 1, 1):
        return "its origin must be an object, topk in it a whole number >= 1"
    return None if metadata["roots"] in ROOTS else f"roots must be one of {', '.join(ROOTS)}"


def _defect_of(tensors: dict[str, Tensor], num_requests: int) -> str | None:
    """Return the defect of a shard's tables; ``None`` if there is none. Measurements may be nan
    here; see :func:`require_finite`.
    """
    types = NODE_COLUMNS | {f"draft.{name}": t for name, t in DRAFT_COLUMNS.items()}
    drafts, nodes = tensors["draft.request"], tensors["draft"]
    for name, column in tensors.items():
        rows = len(drafts) if name.startswith("draft.") and drafts.dim() else nodes.numel()
        if column.shape[:1] != (rows,) or column.dim() > (1 if name in types else 2):
            return f"the column {name} has the shape {tuple(column.shape)}"
        if column.dtype != types.get(name, _dtype(name, column)):
            return f"the column {name} is of {column.dtype}"
    if not nodes.numel():
        return "it holds no drafted tokens"
    if not _within(drafts, 0, num_requests - 1) or not _within(nodes, 0, len(drafts) - 1):
        return "its tables name requests or drafts that are not there"
    first = torch.searchsorted(nodes, nodes)
    row, parent = torch.arange(len(nodes)), tensors["parent"].long()
    above = torch.where(parent < 0, 0, tensors["depth"][(first + parent).clamp(0, len(row) - 1)])
    if bool((nodes.diff() < 0).any()) or not bool(
        ((parent >= -1) & (first + parent < row) & (tensors["depth"] == above.long() + 1)).all()
    ):
        return "its tokens do not follow their parents"
    shares = [tensors[name] for name in ("prob", "joint", "accept")]
    if any(bool(((share < 0) | (share > MOST_PROB)).any()) for share in shares):
        return "its probabilities or labels are not in [0, 1]"
    return None


def _within(column: Tensor, least: int, most: int) -> bool:
    return not column.numel() or (least <= int(column.min()) and int(column.max()) <= most)
