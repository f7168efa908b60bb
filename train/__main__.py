"""Run the command line: ``python -m train run | compare | inspect | config CONFIG …``, ``table``, ``report``, …"""

import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # pictures go to files; a notebook's backend may not be installed here

try:
    from train.cli.commands import main
except KeyboardInterrupt:  # torch takes seconds to import
    print("interrupted", file=sys.stderr)
    sys.exit(130)
except ImportError:
    home = Path(__file__).resolve().parents[1]
    for name in ("models", "sharding"):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source and home not in Path(source).resolve().parents:
            print(f"error: {source} is in the way of our package {name}; rename or move it", file=sys.stderr)
            sys.exit(2)
    raise

if __name__ == "__main__":
    sys.exit(main())
