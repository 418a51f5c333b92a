"""The command `stio`, also as `python -m stio`."""

from __future__ import annotations

import sys

try:
    from stio.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("click", "rich"):
        raise
    sys.exit("stio: the command line needs two more packages: pip install 'stio[cli]'")

if __name__ == "__main__":
    main()
