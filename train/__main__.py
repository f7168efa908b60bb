"""Run the command line: ``python -m train run | compare | inspect | config CONFIG …``, ``table``, ``report``, …"""

import sys

try:
    from train.cli.commands import main
except KeyboardInterrupt:  # torch takes seconds to import
    print("interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
