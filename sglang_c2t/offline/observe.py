"""Read a running server: its settings, its counters, and how these grow. Reads ``GET /c2t``,
``/server_info`` and ``/metrics``. If one is missing, a :class:`~sglang_c2t.config.ConfigError` says
which flag the server needs.
"""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from prometheus_client.parser import text_string_to_metric_families

from sglang_c2t.config import ConfigError
from sglang_c2t.offline.client import authorization, key_wanted

#: Seconds after which a server counts as not answering.
PATIENCE = 20.0

#: SGLang's series that are read in addition to ours.
SGLANGS = {
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:num_retracted_requests_total",
}

#: Labels that keep the values of one of our series apart.
OWN_LABELS = ("reason", "le")


@dataclass(frozen=True)
class Sample:
    """The values of ``/metrics`` at one moment, summed over replicas."""

    at: float  # seconds, monotonic
    values: Mapping[str, float]  # by name and own label: c2t:plans_total{plan}
    replicas: int  # schedulers that count steps
    fullest: float  # share of the KV cache in use, the largest of all replicas

    def __getitem__(self, name: str) -> float:
        """The value by its name; 0 if nothing was counted yet."""
        return self.values.get(name, 0.0)


def sample_of(text: str, at: float) -> Sample:
    """Parse the text of ``/metrics``; :class:`ConfigError` if it is none."""
    values: defaultdict[str, float] = defaultdict(float)
    replicas, fullest = 0, 0.0
    try:
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                if one.name.startswith("c2t:") or one.name in SGLANGS:
                    own = "".join(f"{{{one.labels[n]}}}" for n in OWN_LABELS if n in one.labels)
                    values[one.name + own] += one.value
                    replicas += one.name == "c2t:steps_total"
                    if one.name == "sglang:token_usage":
                        fullest = max(fullest, one.value)
    except ValueError as error:
        raise ConfigError(f"/metrics holds no Prometheus series: {error}") from error
    return Sample(at, dict(values), replicas, fullest)


@dataclass(frozen=True)
class Window:
    """The counts between two samples of a server."""

    before: Sample
    after: Sample

    @property
    def seconds(self) -> float:
        """Time between the samples."""
        return max(self.after.at - self.before.at, 1e-9)

    @property
    def restarted(self) -> bool:
        """Whether a counter fell: the server is a new process."""
        counters = (n for n in self.before.values if "_total" in n or "_bucket" in n)
        return any(self.after[name] < self.before[name] for name in counters)

    def __getitem__(self, name: str) -> float:
        """The growth of a counter; after a restart, its growth since then."""
        before = 0.0 if self.restarted else self.before[name]
        return self.after[name] - before

    def rate(self, name: str) -> float:
        """The growth of a counter per second."""
        return self[name] / self.seconds

    def by_label(self, counter: str) -> dict[str, float]:
        """The growth of a counter by the values of its own label, without zeros."""
        start = f"{counter}{{"
        names = (name for name in self.after.values if name.startswith(start))
        return {name[len(start) : -1]: self[name] for name in names if self[name]}

    def at_least(self, histogram: str) -> dict[int, float]:
        """The counts of lengths in a histogram that are at least 1, 2, ..."""
        below: dict[float, float] = {}
        for name in self.after.values:
            if name.startswith(f"{histogram}_bucket{{"):
                below[float(name.rsplit("{", 1)[1].rstrip("}"))] = self[name]
        count = self[f"{histogram}_count"]
        edges = sorted(int(edge) for edge in below if edge != float("inf"))
        # Beyond 16 buckets are wide: their lengths count as the upper edge.
        return {
            length: count - below[edge]
            for edge, higher in itertools.pairwise(edges)
            for length in range(edge + 1, higher + 1)
        }


@dataclass(frozen=True)
class Server:
    """A server's address, and the key of its clients. All calls raise :class:`ConfigError` if it
    does not answer as a ``--c2t`` server does.
    """

    url: str
    api_key: str | None = None
    patience: float = PATIENCE

    def sample(self) -> Sample:
        """``/metrics`` now."""
        answered = self._get("/metrics")
        if answered is None:
            raise ConfigError(
                f"the server at {self.url} counts nothing: start it with --enable-metrics"
            )
        return sample_of(answered, time.monotonic())

    def told(self) -> dict[str, Any]:
        """``GET /c2t``: settings in force, and the state of each scheduler and planner."""
        answered = self._get("/c2t")
        if answered is None:
            raise ConfigError(
                f"the server at {self.url} runs without --c2t: start it with that flag, and with "
                "speculative decoding"
            )
        told = self._parsed(answered)
        if not isinstance(told, dict) or not told.get("serving"):
            raise ConfigError(
                f"the server at {self.url} does not tell how it verifies: install this version of "
                "sglang-c2t there, and restart it"
            )
        return told

    def info(self) -> dict[str, Any]:
        """``/server_info``: the server's arguments."""
        answered = self._get("/server_info")
        info = None if answered is None else self._parsed(answered)
        if not isinstance(info, dict) or "internal_states" not in info:
            raise ConfigError(f"no SGLang server answers at {self.url}")
        return info

    def _get(self, path: str) -> str | None:
        """The body of the answer; ``None`` on 404."""
        try:
            asked = urllib.request.Request(self.url + path, headers=authorization(self.api_key))
            with urllib.request.urlopen(asked, timeout=self.patience) as response:
                body: bytes = response.read()
                return body.decode()
        except HTTPError as error:
            if error.code == 404:
                return None
            if error.code in (401, 403):
                raise ConfigError(key_wanted(self.url, self.api_key)) from error
            raise NoAnswerError(f"{self.url}{path} answered {error.code}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(f"no SGLang server answers at {self.url}: {error}") from error

    def _parsed(self, body: str) -> Any:
        try:
            return json.loads(body)
        except ValueError as error:
            raise ConfigError(f"no SGLang server answers at {self.url}: {error}") from error


class NoAnswerError(ConfigError):
    """The server does not answer now; it may be restarting."""
