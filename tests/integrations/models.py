"""Tiny models of common families, with random weights, and data that they can learn."""

import torch

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **without_dropout, max_position_embeddings=16))


MODELS = {"llama": llama, "mixtral": mixtral, "bert": bert}


class Tokens(torch.utils.data.Dataset):
    """Sequences in which the second half repeats the first."""

    def __init__(self, size=32):
        halves = torch.randint(32, (size, 4), generator=torch.Generator().manual_seed(0))
        self.tokens = torch.cat([halves, halves], dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, place):
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}
