"""What a run costs before it is started: parameters, FLOPs, memory, hours, what decay does, and an update on N GPUs."""
