"""The configuration: every wrong value is one clear line, every right one survives travel."""

import json

import pytest

from sglang_c2t import config
from sglang_c2t.config import C2TConfig, ConfigError


def test_config_survives_the_trip_through_json() -> None:
    original = C2TConfig(policy="fixed", beta=0.25, policy_options={"length": 2})
    assert C2TConfig.from_json(original.to_json(), source="test") == original


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"beta": 1.5}, "beta must be a number in (0, 1), got 1.5"),
        ({"beta": 0.0}, "beta must be a number in (0, 1), got 0.0"),
        ({"beta": "high"}, "beta must be a number in (0, 1), got 'high'"),
        ({"beta": True}, "beta must be a number in (0, 1), got True"),
        ({"policy": ""}, "policy must be a non-empty string"),
        ({"verify": "packed"}, "verify must be one of auto, ragged, static, got 'packed'"),
        ({"record": 3}, "record must be a directory, got 3"),
        ({"policy_options": [1]}, "policy_options must be an object"),
        ({"betta": 0.5}, "unknown c2t setting 'betta'; allowed: policy, beta"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(values: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        C2TConfig.from_mapping(values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not valid JSON"), ("[]", "must hold a JSON object, got list")]
)
def test_a_config_that_is_no_json_object_names_its_file(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "c2t.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        C2TConfig.from_file(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_config_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read c2t config file .*absent\.json"):
        C2TConfig.from_file(tmp_path / "absent.json")


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path) -> None:
    path = tmp_path / "c2t.json"
    path.write_text(json.dumps({"policy": "fixed", "verify": "static"}))
    resolved = config.resolve(file=str(path), flags={"verify": "ragged"})
    assert resolved == C2TConfig(policy="fixed", verify="ragged")


def test_the_environment_switches_c2t_on(monkeypatch, tmp_path) -> None:
    """The variable holds JSON or a path; unset or empty means off."""
    monkeypatch.delenv(config.CONFIG_ENV, raising=False)
    assert config.active() is None
    monkeypatch.setenv(config.CONFIG_ENV, "")
    assert config.active() is None
    monkeypatch.setenv(config.CONFIG_ENV, '{"beta": 0.75}')
    assert config.active() == C2TConfig(beta=0.75)
    path = tmp_path / "c2t.json"
    path.write_text('{"policy": "fixed"}')
    monkeypatch.setenv(config.CONFIG_ENV, str(path))
    assert config.active() == C2TConfig(policy="fixed")
