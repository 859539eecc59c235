"""What the server that ranks are forked from imports last: collections in ranks pass over all of it.

One that looked at torch's modules would have each of their pages copied: half a second of a processor.
"""

import gc

gc.freeze()
gc.enable()
