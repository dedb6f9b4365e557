"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from muonsw.lab.data.tokenizers import Tokenizer
from muonsw.lab.model import Decoder


@torch.no_grad()
def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt, until a document ends.

    Args:
        model: On any device.
        tokenizer: The one it was trained with.
        prompt: What to continue; an empty one starts a document.
        tokens: At most so many.
        temperature: 0 always takes the likeliest token.
        top_k: Draw among so many likeliest tokens; 0 among all.
        seed: Of the draws.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.end_of_document, *tokenizer.encode(prompt).tolist()]
    for _ in range(tokens):
        context = torch.tensor([ids[-model.config.sequence :]], device=device)
        logits = model.logits(context)[0, -1, : tokenizer.vocab_size].float().cpu()
        ids.append(_draw(logits, temperature, top_k, generator))
        if ids[-1] == tokenizer.end_of_document:
            return
        yield ids[-1]


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    kept = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((kept.values / temperature).softmax(0), 1, generator=generator)
    return int(kept.indices[chosen])
