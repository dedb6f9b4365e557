"""What names tell, and which parts of a name tell nothing. The rules look at names last, after structure."""

from __future__ import annotations

import re

from torch import nn

# Words that torch.compile, FSDP, activation checkpointing and Lightning put into names.
WRAPPER_WORDS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# Classes that keep the wrapped model in `module`, a word that other classes use for parts of their own.
WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel"})
# What PEFT puts into names: the model it wraps, the layer it adapts, the copy that it trains.
PEFT_PREFIX = "base_model.model."
PEFT_WORDS = frozenset({"base_layer", "modules_to_save"})

EXPERT_COUNT = re.compile(r"^((num|n|moe)_)?(\w+_)?experts?$")
ROUTER = re.compile(r"(^|_|k)(router|routing)($|_)")
GATE = re.compile(r"^(gate|gating|gate_network|wg|w_gate|switch|selector)(_weight)?$")
MIXTURE = re.compile(r"(^|_)(moe|mixture)($|_)")
EXPERT = re.compile(r"(?<!shared)(^|_)experts?($|_|\d)")
DOWN = re.compile(r"(^|_)(down|w2|wo|o|out|output|fc2|post|c_proj)($|_|\d)")
HEAD = re.compile(
    r"(^|_)(heads?|classifiers?|logits?|scores?|predictors?|predictions?|pred|outputs|class_embed|bbox_(embed|reg))"
    r"(_(dist\w*|aux|\d+))?$|^(output|embed_out|unembed|unembedding|final(_layer)?)$"
)
# The queries, keys or values of one attention: q_proj, to_k, wv, value.
QUERY_KEY_VALUE = re.compile(r"(?:^|_|w)(q|k|v)(?:uer(?:y|ies)|eys?|alues?)?(?:$|_)")
MODULATION = re.compile(r"modulation|ada_?(ln|norm)|film")
POSITION = re.compile(r"(^|_)(cpb|rel_?pos|pos|position|positional|meta)($|_)")
ADAPTER = re.compile(r"(^|_)(lora|hada|lokr)_", re.IGNORECASE)
BIAS = re.compile(r"(^|_)bias(es)?($|_)|bias$")
TABLE = re.compile(
    r"emb(ed(ding)?s?)?($|_|\d)|pos($|_)|position|token|table|registers?|latents?|quer(y|ies)|prompt|codebook|codevector|"
    r"relative|(^|_)rel($|_)|prototype|centroid|attention_biases"
)
ELEMENTWISE = re.compile(
    r"(^|_)(scale|gain|gamma|alpha|beta|lambda|temperature|decay|mix|mask|threshold|freqs?|inv_freq)($|_|\d)|"
    r"^A(_log)?$|_log$|^D$"
)
LINEAR = re.compile(
    r"(^|_)(weight|kernel|proj(ection)?|linear|w|in_proj_weight|fc|qkvo?|kv)($|_|\d)|^[wW][_a-z]?\d?$|^[wW]_|^v1$"
)
FUSED = re.compile(r"qkv|query_key_value|queries_keys_values|c_attn|(^|_)kv($|_)|gate_up|up_gate", re.IGNORECASE)


def clean_name(model: nn.Module, name: str) -> str:
    """A parameter's name without the words of wrappers, so that patterns and saved names do not depend on them."""
    module: object = model
    words = []
    for word in name.split("."):
        if not _is_wrappers(module, word):
            words.append(word)
        module = getattr(module, word, None) if isinstance(module, nn.Module) else None
    return ".".join(words)


def unwrapped(module: nn.Module) -> nn.Module:
    inner = next((part for word, part in module.named_children() if _is_wrappers(module, word)), None)
    return module if inner is None else unwrapped(inner)


def _is_wrappers(module: object, word: str) -> bool:
    classes = {cls.__name__ for cls in type(module).__mro__}
    return word in WRAPPER_WORDS or (word == "module" and bool(classes & WRAPPER_CLASSES))


def says_expert(word: str) -> bool:
    """Whether a name or class is one for routed experts; a shared expert is an ordinary layer."""
    return bool(EXPERT.search(_snake_case(word)))


def says_router(word: str) -> bool:
    return bool(ROUTER.search(_snake_case(word)))


def _snake_case(word: str) -> str:
    """A class name in the form of a module's name, without the prefix of fully_shard: `top_krouter` for TopKRouter."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word.removeprefix("FSDP")).lower()
