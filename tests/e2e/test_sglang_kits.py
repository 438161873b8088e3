"""SGLang's own test kits, from its wheel, against ``--c2t`` servers.

Which kits are run, at which scale, and which are not, and why: eval/lossless/kits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eval.lossless import kits
from eval.server import Launch, Server, running, speculative_flags

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def references(plain: Server) -> Iterator[kits.References]:
    """References of the kits, whose scale is reduced for these tests."""
    with kits.demo_scale():
        yield kits.references(plain.url)


class OnAServer(kits.DemoKit):
    """A server for each class of kits."""

    drafts: ClassVar[dict[str, int]] = {}

    @pytest.fixture(autouse=True, scope="class")
    def _serve(
        self, request: pytest.FixtureRequest, logs: Path, references: kits.References
    ) -> Any:
        cls = request.cls
        flags = (*speculative_flags("EAGLE3", **cls.drafts), "--c2t", *cls.flags)
        with running(Launch(f"kits-{cls.__name__}", flags, env=cls.env), logs) as server:
            kits.attach(cls, server, references)
            yield


class TestSglangKits(kits.ServingKits, OnAServer):
    """One server of chains, every kit that the CPU engine can run."""


class TestSglangKitsOnTrees(TestSglangKits):
    """The same, every draft a tree."""

    drafts: ClassVar[dict[str, int]] = {"topk": 4, "num_draft_tokens": 16}


class TestRunningTimeout(kits.RunningTimeoutKits, OnAServer):
    """A server of chains."""


class TestWaitingTimeout(kits.WaitingTimeoutKits, OnAServer):
    """A server of trees."""

    drafts: ClassVar[dict[str, int]] = {"topk": 4, "num_draft_tokens": 16}
