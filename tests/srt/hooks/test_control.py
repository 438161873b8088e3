"""A POST to /c2t changes the settings in force; clients may name only some settings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_c2t.policies
from sglang_c2t.classifier.checkpoint import SHIPPED, shipped_names
from sglang_c2t.config import C2TConfig, ConfigError
from sglang_c2t.policies import policy_names
from sglang_c2t.policies.base import TreeShape
from sglang_c2t.srt.hooks import control
from sglang_c2t.srt.hooks.control import approved, changed, settings
from sglang_c2t.srt.hooks.http_guard import RefusedError
from sglang_c2t.srt.hooks.reporting import CONTROL

START = C2TConfig(policy="c2t-log", beta=0.3, classifier="at/start/mine.safetensors")
IN_FORCE = C2TConfig(policy="c2t-log", beta=0.4, classifier="c2t-log", max_verify_rows=64)
CHAIN = TreeShape(1, 5, 6)


def test_control_settings_that_are_not_named_stay() -> None:
    new = changed(IN_FORCE, {"beta": 0.7}, START)
    assert settings(new) == {**settings(IN_FORCE), "beta": 0.7}
    assert new.max_verify_rows == 64


def test_control_policy_brings_its_own_threshold_and_classifier() -> None:
    new = changed(IN_FORCE, {"policy": "fixed", "policy_options": {"length": 3}}, START)
    assert settings(new) == {
        "policy": "fixed",
        "beta": None,
        "classifier": "default",
        "policy_options": {"length": 3},
        "tpot_ms": None,
    }
    assert new.max_verify_rows == 64


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"beta": "0.5"}, "beta must be a number"),
        ({"max_verify_rows": 3}, "cannot change while the server runs; what can: policy, beta"),
        ({"loopback_control": True}, "cannot change"),
        ({"polcy": "fixed"}, "did you mean policy?"),
        ({}, "nothing to change"),
        ("c2t", "must be a JSON object, got str"),
        ({"policy": "os:system"}, "unknown c2t policy 'os:system'"),
        ({"policy": "tests.e2e.server_policies:Switchable"}, "unknown c2t policy"),
        ({"policy": "c2t-pls"}, "did you mean c2t-plus?"),
        ({"policy": "\u00e9" * 5000}, "a name of 1 to 200 printable characters"),
        ({"classifier": ["c2t"]}, "classifier must be one of default, c2t, "),
        ({"policy_options": {"beta": 0.5}}, "beta is a setting of its own"),
    ],
)
def test_control_invalid_settings_are_refused(body: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        changed(IN_FORCE, body, START)
    assert said in str(error.value)
    assert str(error.value).isascii()


@given(
    st.dictionaries(
        st.sampled_from(control.CHANGEABLE) | st.text(max_size=5),
        st.sampled_from([*policy_names(), "default"])
        | st.text()
        | st.floats()
        | st.dictionaries(st.text(), st.integers())
        | st.lists(st.integers()),
    )
)
def test_control_accepts_known_names_only(values: dict[str, Any]) -> None:
    """No name that a client made up gets past, so none reaches an import or a file."""
    try:
        new = changed(IN_FORCE, values, START)
    except ConfigError:
        return
    assert new.policy in policy_names()
    assert new.classifier in {
        "default", START.classifier, IN_FORCE.classifier, *shipped_names(),
    }  # fmt: skip


# -- a policy of one's own -----------------------------------------------------------------

OWN = C2TConfig(policy="tests.e2e.server_policies:Switchable", policy_options={"control": "/a/b"})


def test_control_policy_of_the_start_comes_back_with_its_options() -> None:
    away = changed(OWN, {"policy": "fixed"}, OWN)
    back = changed(away, {"policy": OWN.policy}, OWN)
    assert back == OWN


@pytest.mark.parametrize(
    "values", [{"policy": OWN.policy, "policy_options": {"control": "/etc"}},
               {"policy_options": {"control": "/etc"}}, {"policy_options": {}}],
)  # fmt: skip
def test_control_options_of_the_start_policy_cannot_change(values: dict[str, Any]) -> None:
    """They may be files."""
    with pytest.raises(ConfigError, match="keeps the policy_options that the server was started"):
        changed(OWN, values, OWN)


def test_control_shows_no_paths() -> None:
    told = settings(C2TConfig(policy=OWN.policy, policy_options={"control": "/a/b"},
                              classifier="/x/y/mine.safetensors"))  # fmt: skip
    assert "/" not in json.dumps(told)
    assert told["classifier"] == "mine.safetensors"
    assert told["policy_options"] == {"control": "as at start"}


# -- classifiers ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a good classifier, a broken one, links out of it, and files beside it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for ending in (".safetensors", ".json"):
        data = (SHIPPED / "c2t").with_suffix(ending).read_bytes()
        (inside / "good").with_suffix(ending).write_bytes(data)
        (tmp_path / "outside").with_suffix(ending).write_bytes(data)
        (inside / "link").with_suffix(ending).symlink_to((tmp_path / "outside").with_suffix(ending))
    (inside / "half.safetensors").write_bytes((inside / "good.safetensors").read_bytes())
    (inside / "half.json").symlink_to(tmp_path / "outside.json")
    (inside / "broken.safetensors").write_bytes(b"secret weights")
    (inside / "broken.json").write_text('{"format": "top secret"}')
    (inside / ".hidden.safetensors").write_bytes(b"")
    return inside


def taken(value: object, start: C2TConfig) -> C2TConfig:
    """The configuration after both checks."""
    config = changed(C2TConfig("c2t"), {"classifier": value}, start)
    approved(config, start, CHAIN)
    return config


def test_control_classifier_of_the_directory_is_taken_by_name(folder: Path) -> None:
    config = taken("good.safetensors", C2TConfig(classifier_dir=str(folder)))
    assert config.classifier == str(folder / "good.safetensors")
    assert settings(config)["classifier"] == "good.safetensors"


def test_control_classifier_shipped_or_of_the_start_is_taken_by_name(folder: Path) -> None:
    start = C2TConfig(classifier=str(folder.parent / "outside.safetensors"))
    for value in (start.classifier, "outside.safetensors"):
        assert taken(value, start).classifier == start.classifier
    assert taken("c2t", start).classifier == "c2t"
    assert settings(taken("c2t", start))["classifier"] == "c2t"
    assert taken("default", start).classifier == "default"


@pytest.mark.parametrize(
    "value",
    ["../outside.safetensors", "/etc/passwd", "inside/good.safetensors", ".hidden.safetensors",
     "good", "good.json", "good.safetensors\n", "GOOD.safetensors/../good.safetensors", "",
     "/etc/absent", "absent.safetensors", "..", "x" * 5000, "good.safetensors\0", 3],
)  # fmt: skip
def test_control_classifier_of_any_other_path_is_refused_equally(folder: Path, value: Any) -> None:
    """The answer is the same whether a file outside exists."""
    start = C2TConfig(classifier_dir=str(folder))
    with pytest.raises(ConfigError) as error:
        taken(value, start)
    told, _, got = str(error.value).partition(", got ")
    files = [f"{name}.safetensors" for name in ("broken", "good", "half", "link")]
    known = ["default", *shipped_names(), *files]
    assert told == f"classifier must be one of {', '.join(known)}"
    assert len(got) < 300


@pytest.mark.parametrize("name", ["link", "half"])
def test_control_classifier_link_out_of_the_directory_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}.safetensors' is no file of its directory"):
        taken(f"{name}.safetensors", C2TConfig(classifier_dir=str(folder)))


def test_control_classifier_error_goes_to_the_log_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as error:
        taken("broken.safetensors", C2TConfig(classifier_dir=str(folder)))
    assert "'broken.safetensors' cannot be used: the server's log says why" in str(error.value)
    assert "secret" not in str(error.value)
    assert "top secret" in caplog.text


def test_control_classifier_of_another_policy_is_refused_without_its_path(folder: Path) -> None:
    start = C2TConfig(classifier_dir=str(folder))
    config = changed(
        C2TConfig("c2t"), {"policy": "c2t-plus", "classifier": "good.safetensors"}, start
    )
    with pytest.raises(ConfigError) as error:
        approved(config, start, CHAIN)
    assert "classifier good.safetensors wants joint" in str(error.value)
    assert str(folder) not in str(error.value)


# -- in the scheduler -----------------------------------------------------------------------


class Worker:
    """Takes settings as :meth:`Serving.change` does, less the gate."""

    def __init__(self, start: C2TConfig) -> None:
        self.start = self.config = start

    def change(self, values: object) -> C2TConfig:
        config = changed(self.config, values, self.start)
        approved(config, self.start, CHAIN)
        self.config = config
        return config


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(control, "publish", lambda config: None)
    monkeypatch.setattr(CONTROL, "switches", 0)
    monkeypatch.setattr(CONTROL, "refusal", None)
    return SimpleNamespace(draft_worker=Worker(C2TConfig("c2t")))


def sent(scheduler: Any, *names: str) -> bool:
    """Whether a message with these names was taken."""
    message = SimpleNamespace(server_args=dict.fromkeys(names, 1))
    return bool(control.set_internal_state(lambda *_: pytest.fail("stock"), scheduler, message)
                .updated)  # fmt: skip


def test_control_scheduler_takes_valid_settings(scheduler: Any) -> None:
    assert sent(scheduler, 'c2t {"policy": "dyjoint", "beta": 0.2}')
    assert scheduler.draft_worker.config == C2TConfig(policy="dyjoint", beta=0.2)
    assert (CONTROL.switches, CONTROL.refusal) == (1, None)
    theirs = SimpleNamespace(server_args={"pp_max_micro_batch_size": 8})
    assert control.set_internal_state(lambda *got: got, scheduler, theirs) == (scheduler, theirs)


@pytest.mark.parametrize(
    "names",
    [
        ["c2t "], ["c2t {"], ["c2t " + "[" * 100_000], ["c2t []"], ["c2t {}"],
        ['c2t {"policy": "os:system", "policy_options": {"command": "true"}}'],
        ['c2t {"policy": "c2t", "policy": "fixed"}'], ['c2t {"beta": 1e999}'],
        ['c2t {"classifier": "/etc/passwd"}'], ['c2t {"policy": "\\u0000"}'],
        ['c2t {"beta": 0.5}', 'c2t {"beta": 0.6}'], ['c2t {"beta": 0.5}', "max_micro_batch_size"],
    ],
)  # fmt: skip
def test_control_scheduler_refuses_hostile_messages(scheduler: Any, names: list[str]) -> None:
    assert not sent(scheduler, *names)
    assert scheduler.draft_worker.config == C2TConfig("c2t")
    assert CONTROL.refusal


def test_control_scheduler_survives_every_error(scheduler: Any) -> None:
    def fail(values: object) -> C2TConfig:
        raise MemoryError("the path /a/b")

    scheduler.draft_worker.change = fail
    assert not sent(scheduler, 'c2t {"beta": 0.5}')
    assert CONTROL.refusal == "the settings cannot be served: the server's log says why"
    assert not sent(SimpleNamespace(draft_worker=None), 'c2t {"beta": 0.5}')


def test_control_scheduler_imports_nothing_for_a_client(
    monkeypatch: pytest.MonkeyPatch, scheduler: Any
) -> None:
    monkeypatch.setattr(
        sglang_c2t.policies.importlib, "import_module", lambda name: pytest.fail(f"imports {name}")
    )
    for policy in ("os:system", "tests.canary:Policy", ":x", "a.b:c-eagle2"):
        assert not sent(scheduler, "c2t " + json.dumps({"policy": policy}))


# -- several schedulers -----------------------------------------------------------------------


class Schedulers:
    """A tokenizer manager before schedulers of these ranks, the last of which takes nothing."""

    def __init__(self, *ranks: int, refusing: bool = False) -> None:
        self.ranks, self.refusing = ranks, refusing
        self.configs = dict.fromkeys(ranks, C2TConfig("c2t"))
        self.server_args = SimpleNamespace(
            speculative_eagle_topk=1, speculative_num_steps=5, speculative_num_draft_tokens=6
        )

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """In no order."""
        refusal = "no memory is left"
        return [
            {"c2t": {
                "dp_rank": rank,
                "config": self.configs[rank].to_json(),
                "control": {"switches": rank, "refusal": refusal if self.refuses(rank) else None},
                "planner": {"steps": 10 * rank},
                "serving": {"packed": True, "max_running_requests": 8 + rank},
            }}
            for rank in self.ranks
        ]  # fmt: skip

    async def set_internal_state(self, message: Any) -> list[bool]:
        (name,) = message.server_args
        values = json.loads(name.removeprefix("c2t "))
        for rank in self.ranks:
            if not self.refuses(rank):
                self.configs[rank] = changed(self.configs[rank], values, C2TConfig("c2t"))
        return [not self.refuses(rank) for rank in self.ranks]

    def refuses(self, rank: int) -> bool:
        return self.refusing and rank == self.ranks[-1]


def posted(schedulers: Schedulers) -> dict[str, Any]:
    return asyncio.run(control._post(schedulers, b'{"beta": 0.7}', C2TConfig("c2t")))


def test_control_reports_schedulers_by_rank() -> None:
    told = posted(Schedulers(2, 0, 1))
    assert (told["beta"], told["switches"]) == (0.7, [0, 1, 2])
    assert told["planner"] == [{"steps": 0}, {"steps": 10}, {"steps": 20}]
    assert [one["max_running_requests"] for one in told["serving"]] == [8, 9, 10]
    assert "differing" not in told


def test_control_settings_that_one_scheduler_refuses_are_reported() -> None:
    schedulers = Schedulers(0, 1, refusing=True)
    with pytest.raises(RefusedError, match=r"only 1 of 2 .*: no memory is left") as refused:
        posted(schedulers)
    assert refused.value.status == 500
    told = control._told(asyncio.run(control._states(schedulers)))
    assert [settings["beta"] for settings in told["differing"]] == [0.7, None]


def test_control_settings_that_every_scheduler_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^no memory is left$"):
        posted(Schedulers(0, refusing=True))
