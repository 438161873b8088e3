"""Servers as pages and deployment files start them: SGLang takes each command line, and the files
are what Docker, Compose and Kubernetes read.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_c2t import __version__

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "sglang_c2t" / "guides"
DEPLOY = GUIDES / "deploy"
PAGES = [ROOT / "README.md", *sorted(GUIDES.rglob("*.md"))]


def commands(page: str) -> Iterator[list[str]]:
    """Arguments of each server that a fenced block starts; what it leaves out as ``...`` too."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"\bsglang\.launch_server\b|\bsglang serve\b", line):
                words = shlex.split(line, comments=True)
                launcher = "sglang.launch_server" if "sglang.launch_server" in words else "serve"
                yield [word for word in words[words.index(launcher) + 1 :] if word != "..."]


def shown() -> list[Any]:
    return [
        pytest.param(given, id=f"{page.relative_to(ROOT)}-{place}")
        for page in PAGES
        for place, given in enumerate(commands(page.read_text()))
    ]


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["sglang"]


def deployment() -> Any:
    objects = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (pod,) = (one["spec"]["template"] for one in objects if one["kind"] == "Deployment")
    return pod


def entry_point() -> list[str]:
    """Arguments that the image puts before a container's."""
    found = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    python, m, launcher, *flags = json.loads(found[1])
    assert (python, m, launcher) == ("python3", "-m", "sglang.launch_server")
    return list(flags)


@pytest.fixture(scope="module")
def parser() -> Iterator[argparse.ArgumentParser]:
    """SGLang's own, with the plugin loaded as the launcher loads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        made = argparse.ArgumentParser(allow_abbrev=False)
        ServerArgs.add_cli_args(made)
        yield made


def parsed(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    if given and not given[0].startswith("-"):  # sglang serve MODEL
        given = ["--model-path", *given]
    if "--model-path" not in " ".join(given):  # left out
        given = ["--model-path", "TARGET", *given]
    return parser.parse_args(given)


@pytest.mark.parametrize("given", shown())
def test_sglang_takes_every_command_line_of_a_page(
    parser: argparse.ArgumentParser, given: list[str]
) -> None:
    parsed(parser, given)


@pytest.mark.parametrize("page", sorted((GUIDES / "recipes").glob("*.md")), ids=lambda p: p.name)
def test_every_command_line_of_a_recipe_is_complete(
    parser: argparse.ArgumentParser, page: Path
) -> None:
    """No shape of drafts, or chains of as many rows as they have drafts and a root."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert not any("..." in block for block in blocks)
    for given in commands(page.read_text()):
        args = parsed(parser, given)
        assert args.c2t
        if args.speculative_num_steps is None:
            assert args.speculative_eagle_topk is args.speculative_num_draft_tokens is None
            continue
        assert args.speculative_num_draft_tokens == args.speculative_num_steps + 1
        assert args.speculative_eagle_topk == 1


@pytest.mark.parametrize("file", ["compose.yaml", "kubernetes.yaml"])
def test_sglang_takes_the_flags_of_a_deployment(parser: argparse.ArgumentParser, file: str) -> None:
    (container,) = deployment()["spec"]["containers"]
    given = compose()["command"] if file == "compose.yaml" else container["args"]
    args = parsed(parser, [*entry_point(), *given])
    assert args.c2t
    assert (args.host, args.port) == ("0.0.0.0", 30000)
    assert args.enable_metrics
    assert args.api_key != args.admin_api_key


def test_probes_wait_longer_than_sglang_does() -> None:
    """Its health endpoints take from one second to HEALTH_CHECK_TIMEOUT."""
    from sglang.srt.entrypoints.http_server import HEALTH_CHECK_TIMEOUT

    (container,) = deployment()["spec"]["containers"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["timeoutSeconds"] > HEALTH_CHECK_TIMEOUT for probe in probes)
    assert {probe["httpGet"]["path"] for probe in probes} == {"/health", "/health_generate"}
    waits = re.search(r"--timeout=(\d+)s", (DEPLOY / "Dockerfile").read_text())
    assert waits is not None
    assert int(waits[1]) > HEALTH_CHECK_TIMEOUT


def test_the_state_of_a_planner_outlives_its_container() -> None:
    args = compose()["command"]
    (state,) = (Path(flag.partition("=")[2]) for flag in args if flag.startswith("--c2t-state="))
    assert f"state:{state.parent}" in compose()["volumes"]
    (container,) = deployment()["spec"]["containers"]
    assert f"--c2t-state={state}" in container["args"]
    assert str(state.parent) in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert f"mkdir -p {state.parent}\n" in (DEPLOY / "Dockerfile").read_text()


def test_versions_of_the_images_are_those_of_the_project() -> None:
    from sglang_c2t.srt.versions import TESTED

    assert f"ARG SGLANG=v{TESTED[-1]}\n" in (DEPLOY / "Dockerfile").read_text()
    assert deployment()["spec"]["containers"][0]["image"] == f"sglang-c2t:{__version__}"


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("Dockerfile", [Path(sys.executable).with_name("hadolint")]),
        ("compose.yaml", [sys.executable, "-m", "check_jsonschema",
                          "--builtin-schema", "vendor.compose-spec"]),
        ("kubernetes.yaml", [sys.executable, "-m", "kubernetes_validate", "--strict"]),
    ],
)  # fmt: skip
def test_deployment_files_pass_their_checkers(file: str, command: list[str | Path]) -> None:
    done = subprocess.run([*command, DEPLOY / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
