"""What Megatron-LM's QK-clip makes of weights in float64: `python -m tests.family.record.qk_clip CLONES` writes it."""

import ast
import sys
from types import MethodType, SimpleNamespace

import torch

from tests.family.record.authors import Clone, gaussian, save

REPOSITORY = ("NVIDIA/Megatron-LM", "d98e8a64dd")
THRESHOLD, ALPHA = 4.0, 0.3
LOGITS = [3.0, 9.0, 5.0, 2.0, 1.0, 3.5]


def attention(clones, file, name, methods, **known):
    """An object with methods of one of its classes, and no more of it."""
    clone = Clone(clones, *REPOSITORY, file)
    found = next(node for node in ast.parse(clone.text).body if isinstance(node, ast.ClassDef) and node.name == name)
    chosen = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in methods]
    space = {"torch": torch}
    exec(compile(ast.Module(chosen, []), file, "exec"), space)
    logits = SimpleNamespace(current_max_attn_logits=torch.tensor(LOGITS, dtype=torch.float64))
    made = SimpleNamespace(core_attention=logits, **known)
    for method in methods:
        setattr(made, method, MethodType(space[method], made))
    return made, {**clone.source, "class": name}


def linear(rows, columns, seed):
    return SimpleNamespace(weight=torch.nn.Parameter(gaussian(rows, columns, seed=seed)))


def grouped(clones):
    """Six query heads of size 2 in two groups: each group is its queries, its key, its value."""
    config = SimpleNamespace(qk_clip=True, qk_clip_threshold=THRESHOLD, qk_clip_alpha=ALPHA)
    sizes = {"query_projection_size": 12, "kv_projection_size": 4}
    heads = {"num_attention_heads_per_partition": 6, "num_query_groups_per_partition": 2}
    qkv, methods = linear(20, 3, seed=1), ("clip_qk", "_clip_linear_qkv")
    file = "megatron/core/transformer/attention.py"
    made, source = attention(clones, file, "SelfAttention", methods, config=config, linear_qkv=qkv, **heads, **sizes)
    before = qkv.weight.detach().clone()
    made.clip_qk()
    return {"source": source, "before": [before], "after": [qkv.weight.detach()]}


def latent(clones):
    """Six heads with two plain and one rotary row of queries, two of keys and three of values."""
    config = SimpleNamespace(qk_clip=True, qk_clip_threshold=THRESHOLD, qk_clip_alpha=ALPHA, q_lora_rank=4)
    vars(config).update(qk_head_dim=2, qk_pos_emb_head_dim=1, v_head_dim=3)
    layers = {"linear_q_up_proj": linear(18, 4, seed=2), "linear_kv_up_proj": linear(30, 3, seed=3)}
    known = {"config": config, "num_attention_heads_per_partition": 6, "cache_mla_latents": False, **layers}
    methods = ("clip_qk", "_clip_q_proj_weight", "_clip_kv_proj_weight")
    made, source = attention(
        clones, "megatron/core/transformer/multi_latent_attention.py", "MLASelfAttention", methods, **known
    )
    before = [layer.weight.detach().clone() for layer in layers.values()]
    made.clip_qk()
    return {"source": source, "before": before, "after": [layer.weight.detach() for layer in layers.values()]}


def main(clones):
    known = {"threshold": THRESHOLD, "alpha": ALPHA, "logits": LOGITS}
    save("qk_clip", {**known, "grouped": grouped(clones), "latent": latent(clones)})


if __name__ == "__main__":
    main(sys.argv[1])
