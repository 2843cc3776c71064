"""`python -m kvfix`."""

import sys

from kvfix.cli.entry import main

sys.exit(main())
