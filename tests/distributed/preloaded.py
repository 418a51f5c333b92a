"""What a server of ranks imports last: the collector looks in no rank through what the server has imported.

A full collection takes half a second of a processor in each rank otherwise, and copies the pages of all these objects.
"""

import gc

gc.collect()
gc.freeze()
