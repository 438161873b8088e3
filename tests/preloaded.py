"""Imports of every server, in the order of SGLang's launcher; for :mod:`tests.forked_servers`."""

import gc

import setproctitle
import torch._dynamo  # noqa: F401

# Before models are looked up: SGLang passes over those whose modules it cannot import.
import tests.e2e.vision_server  # noqa: F401

# isort: split
import sglang.srt.server_args
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.srt.entrypoints.http_server  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402
import sglang.srt.models.registry  # noqa: E402, F401

# It looks for the name's place in memory once, before the environment changes.
setproctitle.getproctitle()

# A server forks: what is alive now stays shared, since no collection touches it any more.
gc.collect()
gc.freeze()
