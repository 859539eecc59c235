"""What the server that ranks are forked from imports first: collections take a quarter of the imports."""

import gc

gc.disable()
