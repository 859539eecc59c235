"""The steps that are run on the device, each a process of its own with a time limit."""

from __future__ import annotations

import subprocess
import time
import traceback

from scripts.device_check import measures, suites
from scripts.device_check.outcome import Outcome
from scripts.device_check.plan import LOG, Plan

ORDER = (
    suites.info, suites.kernels, measures.captured, measures.step, measures.small, measures.hooks,
    measures.lengths, suites.shared, suites.conformance, measures.bits, suites.registered, measures.several,
    measures.replayed, measures.compiled, measures.float8, measures.curves, measures.compile_time,
    suites.sanitizer, measures.bandwidth, suites.engine, measures.offload_3b, measures.largest,
    measures.deepspeed, measures.offload,
)  # fmt: skip
STEPS = {f.__name__: f for f in ORDER}
"""The steps by name, the most valuable first in case time runs out."""
PLANS = {
    "first": "info,kernels,captured,step,small,hooks,lengths",
    "compiled": "info,compiled,replayed,compile_time",
    "float8": "info,float8,curves",
    "correct": "info,shared,conformance,registered,bits,sanitizer,bandwidth",
    "engine": "shared,engine",
    "host": "info,offload_3b,largest,deepspeed,offload",
    "several": "info,shared,registered,several,conformance,engine",
}
"""Steps of one call each, of which docs/device-check.md tells about how long they take."""


def attempt(name: str, plan: Plan) -> Outcome:
    """Run a step. It counts as failed if it takes too long, or if this program itself fails in it."""
    started = time.monotonic()
    try:
        if started >= plan.deadline:
            return Outcome(name, False, "not run: no time was left")
        outcome = STEPS[name](plan)
    except subprocess.TimeoutExpired as error:
        outcome = Outcome(name, False, f"stopped after {error.timeout:.0f} s; see {LOG}")
    except Exception as error:
        said = f"device-check failed: {type(error).__name__}: {error}"
        outcome = Outcome(name, False, said, detail={"traceback": traceback.format_exc()})
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome
