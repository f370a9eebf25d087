"""`python -m oasiskv.cli`: the `oasiskv` command of an interpreter into which it was not installed."""

import sys

from oasiskv.cli.main import main

sys.exit(main())
