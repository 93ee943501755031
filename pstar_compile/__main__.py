"""``python -m pstar_compile`` is the ``pstar`` command."""

import sys

from pstar_compile.cli import main

sys.exit(main())
