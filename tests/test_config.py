"""The configuration: every wrong value is one clear line, every right one survives travel."""

import json
import subprocess
import sys

import pytest

from sglang_c2t import config
from sglang_c2t.config import C2TConfig, ConfigError
from tests.refusals import refused


def test_config_survives_the_trip_through_json() -> None:
    original = C2TConfig(
        policy="fixed",
        beta=0.25,
        record="drafts",
        record_share=0.5,
        record_limit_mb=10,
        record_roots="every",
        policy_options={"length": 2},
    )
    assert C2TConfig.from_json(original.to_json(), source="test") == original


@pytest.mark.parametrize(
    ("values", "every"),
    [
        ({"record": "drafts", "record_roots": "every"}, True),
        ({"record": "drafts"}, False),
        ({"record_roots": "every"}, False),
    ],
)
def test_every_root_is_visited_only_to_be_recorded(values: dict, every: bool) -> None:
    assert C2TConfig(**values).visits_every_root is every


def test_recording_is_off_and_cheap_by_default() -> None:
    config = C2TConfig()
    assert config.record is None
    assert (config.record_share, config.record_limit_mb) == (0.01, 1024.0)
    assert config.record_roots == "visited"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"beta": 1.5}, "beta must be a number in (0, 1), got 1.5"),
        ({"beta": 0.0}, "beta must be a number in (0, 1), got 0.0"),
        ({"verify": "packed"}, "verify must be one of auto, ragged, static, got 'packed'"),
        ({"record": ""}, "record must be a directory, got ''"),
        ({"record_share": 0.0}, "record_share must be a number in (0, 1], got 0.0"),
        ({"record_share": 1.01}, "record_share must be a number in (0, 1], got 1.01"),
        ({"record_limit_mb": 0}, "record_limit_mb must be a number of megabytes > 0, got 0"),
        ({"record_roots": "all"}, "record_roots must be one of visited, every, got 'all'"),
        ({"tpot_ms": 1e-300}, "tpot_ms must be a number of milliseconds >= 0.001, got 1e-300"),
        ({"policy_options": {1: 2}}, "policy_options must be an object"),
        ({"policy_options": {"beta": 0.5}}, "beta is a setting of its own: give --c2t-beta, or"),
        ({"policy": "a\nb"}, "policy must be a name of 1 to 200 printable characters"),
        ({"max_verify_rows": True}, "max_verify_rows must be a whole number of nodes >= 1"),
        ({"record": "a\0b"}, "record must be a directory"),
        ({"classifier_dir": ""}, "classifier_dir must be a directory, got ''"),
        ({"loopback_control": 1}, "loopback_control must be true or false, got 1"),
        ({"betta": 0.5}, "unknown c2t setting 'betta'; allowed: policy, beta"),
        ({"betta": 0.5}, "; did you mean beta?"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(values: dict, said: str) -> None:
    with refused(said):
        C2TConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        (None, "cannot read c2t config file"),
    ],
)
def test_a_config_that_is_no_json_object_names_its_file(
    tmp_path, text: str | None, said: str
) -> None:
    path = tmp_path / "c2t.json"
    if text is not None:
        path.write_text(text)
    with refused(said, str(path)):
        C2TConfig.from_file(path)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path) -> None:
    path = tmp_path / "c2t.json"
    path.write_text(json.dumps({"policy": "fixed", "verify": "static"}))
    resolved = config.resolve(file=str(path), flags={"verify": "ragged"})
    assert resolved == C2TConfig(policy="fixed", verify="ragged")


def test_the_environment_switches_c2t_on(monkeypatch) -> None:
    """The variable holds JSON, or a path as below; unset or empty means off."""
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)
    assert config.active() is None
    monkeypatch.setenv(config.CONFIG_ENV, "")
    assert config.active() is None
    monkeypatch.setenv(config.CONFIG_ENV, '{"beta": 0.75}')
    first = config.active()
    assert first == C2TConfig(beta=0.75)
    assert config.active() is first, "parsed once"
    config.publish(C2TConfig(beta=0.5))
    assert config.active() == C2TConfig(beta=0.5)


def test_a_file_is_read_once_and_its_text_travels_on(monkeypatch, tmp_path) -> None:
    """Asked on every request: a file that vanishes or is overwritten is nothing to a server, and
    the processes it starts get the content, not the path.
    """
    path = tmp_path / "c2t.json"
    path.write_text(json.dumps({"policy": "fixed"}))
    monkeypatch.setenv(config.CONFIG_ENV, str(path))
    first = config.active()
    assert first == C2TConfig(policy="fixed")
    path.write_text("{")
    assert config.active() is first
    path.unlink()
    assert config.active() is first
    child = "import sglang_c2t.config as c; print(c.active().policy)"
    told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert told.stdout == "fixed\n"


def test_a_broken_file_is_refused_each_time(monkeypatch, tmp_path) -> None:
    path = tmp_path / "c2t.json"
    path.write_text("{")
    monkeypatch.setenv(config.CONFIG_ENV, str(path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not valid JSON"):
            config.active()
