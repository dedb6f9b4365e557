"""What every part of the lab stands on: exceptions, files, settings, the terminal, signals."""
