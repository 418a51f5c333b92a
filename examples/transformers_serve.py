"""transformers' own server, with loads by stio: `python examples/transformers_serve.py [MODEL]`.

It is `transformers serve` after one line, and takes the same options. Needs transformers with its extra `serving`, and
requests.
"""

import sys

from transformers.cli.transformers import main

import stio.compat

if __name__ == "__main__":
    stio.compat.install()
    sys.argv.insert(1, "serve")
    main()
