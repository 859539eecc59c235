"""What a training run does, told to observers: `engine.observe(Console(), JsonLines("metrics.jsonl"))`.

Modules, lowest first:

observer        what is told, and the class to subclass
transfers       how fast collectives and copies are
flops           operations of what torch calls, counted
observation     what the parts of an engine report to
profile_summary, profiler
                where the time of some steps went
flight_file, flight_recorder
                what a rank has issued and where it is, for a job that fails or hangs
hang            what happened, from all ranks' flights
writers         observers over well-kept libraries
"""

from zero.observe.observer import Event, Observer, Run, Step
from zero.observe.writers.calls import Calls
from zero.observe.writers.console import Console
from zero.observe.writers.json_lines import JsonLines
from zero.observe.writers.mlflow import MLflow
from zero.observe.writers.open_telemetry import OpenTelemetry
from zero.observe.writers.prometheus import Prometheus
from zero.observe.writers.tensorboard import TensorBoard
from zero.observe.writers.weights_and_biases import WeightsAndBiases

__all__ = [
    "Calls",
    "Console",
    "Event",
    "JsonLines",
    "MLflow",
    "Observer",
    "OpenTelemetry",
    "Prometheus",
    "Run",
    "Step",
    "TensorBoard",
    "WeightsAndBiases",
]
