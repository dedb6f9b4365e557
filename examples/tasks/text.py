"""Language models of transformers on the source code of Python's standard library.

    muonsw compare --task examples/tasks/text.py                       # a dense GPT-2
    muonsw compare --task examples/tasks/text.py --task.kind moe       # a mixture of experts (Mixtral)
    muonsw compare --task examples/tasks/text.py --task.kind mamba2    # a state-space model
    muonsw compare --task examples/tasks/text.py --task.kind deltanet  # gated DeltaNet and attention (Qwen3-Next)

Needs `pip install transformers`. Tokens are prepared once, in out/data; `--task.data DIR` takes a folder made by
`muonsw data prepare`.
"""

from pathlib import Path

import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM

from muonsw.lab.data.loader import TokenLoader, open_split, read_record
from muonsw.lab.train.config import default_data

SETTINGS = {"steps": 400, "lr": 0.005, "weight_decay": 1.0, "ns_dtype": "float32"}
VOCAB = 1024
PLAIN = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
KINDS = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}),
    "moe": ("MixtralConfig", PLAIN | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba2": ("Mamba2Config", {
        "hidden_size": 64, "num_hidden_layers": 4, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1,
        "chunk_size": 32,
    }),
    "deltanet": ("Qwen3NextConfig", PLAIN | {
        "intermediate_size": 192, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 0, "decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2, 3],
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }),
}  # fmt: skip


def model(seed, kind="gpt2", data=""):
    """A small model with the initial weights of transformers, without dropout."""
    name, sizes = KINDS[kind]
    vocab = read_record(tokens(data)).vocab_size
    config = getattr(transformers, name)(vocab_size=vocab, bos_token_id=None, eos_token_id=None, **sizes)
    config.use_cache = False
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, dropout, 0.0)
    return AutoModelForCausalLM.from_config(config)


def batches(split, seed, sequence=64, batch=16, data=""):
    """Windows of the text, shuffled by the seed, as a function of the step."""
    return TokenLoader(open_split(tokens(data), split), sequence, batch, seed).batch_at


def tokens(data):
    """The folder of prepared tokens."""
    return Path(data) if data else default_data(VOCAB)


def loss(model, batch):
    """Cross-entropy of the next token, in nats."""
    inputs, targets = batch
    return functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten())


def metrics(model, batch):
    """The share of tokens predicted correctly."""
    inputs, targets = batch
    return {"accuracy": (model(input_ids=inputs).logits.argmax(-1) == targets).float().mean()}
