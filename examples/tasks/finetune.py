r"""Fine-tuning: a model that was pre-trained under each rule learns another text under each rule.

    muonsw compare --weight-decay 1 --out out/pre    # the models: both rules, three seeds
    for rule in constant scaled; do
        muonsw compare --task examples/tasks/finetune.py --task.start "out/pre/runs/$rule-seed{seed}" \
            --task.text new.txt --out out/tuned-$rule
    done

The four arms show whether models pre-trained under one rule learn better. The run's seed replaces `{seed}` in `start`,
so each seed starts from its own model. The metric `old` is the loss on the text of pre-training, which the model should
not forget.
"""

from functools import cache
from pathlib import Path

import torch

from muonsw.lab.data.loader import ValidationLoader, open_split
from muonsw.lab.train.checkpoint import read_config_file
from muonsw.lab.train.export import load_model

SETTINGS = {"steps": 200, "lr": 0.002, "weight_decay": 1.0, "ns_dtype": "float32"}


def model(seed, start=""):
    """The pre-trained decoder."""
    return load_model(folder(start, seed))[0]


def folder(start, seed):
    """The run from which a seed starts."""
    return Path(start.replace("{seed}", str(seed)))


@cache
def encoded(start, text):
    """The new text as tokens of the pre-trained model; the last tenth is held out."""
    if not (start and text):
        raise ValueError("give --task.start RUN, a run of `muonsw train`, and --task.text FILE")
    _, tokenizer = load_model(folder(start, 0))
    tokens = torch.as_tensor(tokenizer.encode(Path(text).read_text(encoding="utf-8"))).long()
    cut = 9 * len(tokens) // 10
    return {"train": tokens[:cut], "validation": tokens[cut:]}


def windows(tokens, starts, length):
    """Inputs and targets that begin at these places."""
    rows = torch.stack([tokens[start : start + length + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(split, seed, start="", text="", batch=8):
    """Random windows of the new text; for validation also windows of the old text."""
    tokens, run = encoded(start, text)[split], read_config_file(folder(start, 0) / "config.json")
    length = run.model.sequence

    def number(i):
        return {"new": windows(tokens, torch.randint(len(tokens) - length, (batch,)).tolist(), length)}

    if split == "train":
        return number
    old = ValidationLoader(open_split(Path(run.data.path), "validation"), length, batch, windows=8 * batch)
    return [{**number(i), "old": pair} for i, (pair, _) in enumerate(old.parts())]


def loss(model, batch):
    """The loss on the new text; on validation without the balancing losses of experts."""
    losses = model(*batch["new"])
    return losses.total if model.training else losses.cross_entropy


def metrics(model, batch):
    """The loss on the text of pre-training."""
    return {"old": model(*batch["old"]).cross_entropy}
