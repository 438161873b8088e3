"""``python -m eval.tables``."""

import sys

from eval.tables.chains import main

sys.exit(main())
