"""The frameworks' tests: `make frameworks` runs them, in an environment that has the frameworks."""

from __future__ import annotations

import os
from importlib.util import find_spec

from accelz.conformance.cluster import preload

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # nothing is downloaded
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # or pyarrow starts one where ranks are forked

if find_spec("transformers") is None:  # the environment of `make test`
    collect_ignore_glob = ["test_*.py"]
else:
    preload("accelerate", "transformers.trainer", "lightning.pytorch", "bitsandbytes", "torchao.quantization")
