"""``python -m sglang_c2t``."""

from sglang_c2t.cli import main

raise SystemExit(main())
