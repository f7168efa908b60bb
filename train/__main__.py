"""Run the command line: ``python -m train run | compare | inspect | config CONFIG …``, ``table``, ``report``, …"""

import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # pictures go to files; a notebook's backend may not be installed here
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # others may have packages of our names, as `examples`

if __name__ == "__main__":  # worker processes import this file too, and need no command line
    try:
        from train.cli.commands import main
    except KeyboardInterrupt:  # torch takes seconds to import
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(main())
