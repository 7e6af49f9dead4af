"""``python -m ckpt.cli``, for where the console command is not on the PATH."""

import sys

from ckpt.cli import main

sys.exit(main())
