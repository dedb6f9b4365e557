"""Measure what an optimizer does to the weights, at sampled steps of any training loop."""

from muonsw.telemetry.session import Telemetry as Telemetry
from muonsw.telemetry.sinks import JsonlSink as JsonlSink
from muonsw.telemetry.sinks import MlflowSink as MlflowSink
from muonsw.telemetry.sinks import Record as Record
from muonsw.telemetry.sinks import TensorBoardSink as TensorBoardSink
from muonsw.telemetry.sinks import WandbSink as WandbSink

__all__ = ["JsonlSink", "MlflowSink", "Record", "Telemetry", "TensorBoardSink", "WandbSink"]
