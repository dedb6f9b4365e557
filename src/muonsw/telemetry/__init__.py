"""Measure what an optimizer does to the weights, at sampled steps of any training loop."""

from muonsw.telemetry.session import Telemetry
from muonsw.telemetry.sinks import JsonlSink, MlflowSink, Record, TensorBoardSink, WandbSink

__all__ = ["JsonlSink", "MlflowSink", "Record", "Telemetry", "TensorBoardSink", "WandbSink"]
