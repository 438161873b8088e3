"""Cost of registering the plugin in the processes of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires

# SGLang imports some of these itself, so they are taken away once it has: what is None in
# sys.modules cannot be imported.
SERVE = """
import json, pkgutil, sys, time
import sglang.srt.server_args, sglang.srt.plugins.hook_registry
import sglang.srt.managers.scheduler, sglang.srt.speculative.eagle_worker_v2

absent = json.loads(sys.argv[1])
for name in list(sys.modules):
    if name.partition(".")[0] in absent:
        del sys.modules[name]
sys.modules.update(dict.fromkeys(absent))

import sglang_c2t
from sglang_c2t.plugin import register
start = time.process_time()
register()
spent = time.process_time() - start
for part in pkgutil.walk_packages(sglang_c2t.__path__, "sglang_c2t."):
    if not part.name.startswith(("sglang_c2t.offline", "sglang_c2t.cpu.stand_in")) and (
        part.name != "sglang_c2t.__main__"
    ):
        __import__(part.name)
print(json.dumps({"spent": spent}))
"""


def test_serving_needs_no_package_of_the_extra_train_and_registers_quickly() -> None:
    """Every module but the offline ones is imported; a tenth of a second was measured."""
    train = [r for r in requires("sglang-c2t") or [] if 'extra == "train"' in r]
    absent = [requirement.partition(";")[0].strip() for requirement in train]
    assert "rich" in absent
    absent.append("scipy")  # only eval/ and tests use it
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(absent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["spent"] < 2.0
