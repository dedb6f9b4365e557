"""Audio: a transformer that fills in masked frames of log-mel spectrograms, on a folder of WAV files.

    muonsw compare --task examples/tasks/audio.py --task.folder recordings

Reads 16-bit files of any rate with the standard library, and holds out a tenth of them.
"""

import wave
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

SETTINGS = {"steps": 600, "lr": 0.003, "weight_decay": 1.0, "ns_dtype": "float32"}
WINDOW, HOP, MELS = 512, 256, 40
FRAMES, SPAN = 64, 8  # frames of an excerpt, and of each of its two masked spans


class Filler(nn.Module):
    """An encoder over frames, with a learned vector in place of masked frames."""

    def __init__(self, width, depth):
        super().__init__()
        self.frames = nn.Linear(MELS, width)
        self.mask = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.02 * torch.randn(FRAMES, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, MELS)

    def forward(self, frames, masked):
        """Predict frames (B, FRAMES, MELS) hidden by `masked` (B, FRAMES)."""
        seen = torch.where(masked[..., None], self.mask, self.frames(frames))
        return self.head(self.layers(seen + self.position))


def model(seed, width=64, depth=4):
    """The model with its initial weights."""
    return Filler(width, depth)


def batches(split, seed, folder="", batch=32):
    """Random excerpts of the recordings, each with two masked spans."""
    held_out = split != "train"
    recordings = [frames for place, frames in enumerate(spectrograms(folder)) if (place % 10 == 9) == held_out]

    def number(i):
        chosen = [recordings[place] for place in torch.randint(len(recordings), (batch,))]
        starts = [int(torch.randint(len(frames) - FRAMES + 1, ())) for frames in chosen]
        frames = torch.stack([frames[start : start + FRAMES] for frames, start in zip(chosen, starts, strict=True)])
        begins = torch.randint(FRAMES - SPAN, (batch, 2, 1))
        masked = ((torch.arange(FRAMES) >= begins) & (torch.arange(FRAMES) < begins + SPAN)).any(1)
        return frames, masked

    return number


@cache
def spectrograms(folder):
    """The log-mel frames (frames, MELS) of every file, with mean 0 and variance 1 over all files."""
    paths = sorted(Path(folder).glob("*.wav")) if folder else []
    recordings = [frames for path in paths if len(frames := log_mel(*read(path))) >= FRAMES]
    if len(recordings) < 10:
        long = f"{len(recordings)} files *.wav of at least {FRAMES} frames (2 seconds at 8 kHz)"
        raise ValueError(f"--task.folder {folder!r} has {long}; give a folder with at least 10")
    everything = torch.cat(recordings)
    return [(frames - everything.mean()) / everything.std() for frames in recordings]


def read(path):
    """Read samples in [-1, 1], averaged over channels, and their rate."""
    with wave.open(str(path)) as file:
        channels, rate = file.getnchannels(), file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    return torch.from_numpy(samples.reshape(-1, channels).mean(1) / 32768).float(), rate


def log_mel(samples, rate):
    """The log energy in bands of equal width on the mel scale, (frames, MELS)."""
    spectrum = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True).abs().square()
    tops = 2595 * np.log10(1 + rate / 2 / 700)
    edges = torch.from_numpy(700 * (10 ** (np.linspace(0, tops, MELS + 2) / 2595) - 1))
    bins = torch.linspace(0, rate / 2, WINDOW // 2 + 1, dtype=torch.float64)
    low, middle, high = (edges[part, None] for part in (slice(0, MELS), slice(1, MELS + 1), slice(2, MELS + 2)))
    bands = torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0).float()
    return (bands @ spectrum + 1e-6).log().T


def loss(model, batch):
    """Squared error at masked frames, relative to the variance of all frames."""
    frames, masked = batch
    return (model(frames, masked) - frames)[masked].square().mean()
