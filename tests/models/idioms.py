"""Small models in plain torch, each with one common idiom."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

MODELS = {}


def idiom(build):
    MODELS[build.__name__] = build
    return build


class Holder(nn.Module):
    """A module with these members, which is never run."""

    def __init__(self, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


def holds(**members):
    """Make a holder with a separate class, as in a hand-written model."""
    return type("Part", (Holder,), {})(**members)


def parameter(*shape):
    return nn.Parameter(torch.empty(shape))


@idiom
def perceptron():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


@idiom
def tied_head_first():
    model = holds(unembed=nn.Linear(8, 50, bias=False), body=nn.Linear(8, 8, bias=False), embed=nn.Embedding(50, 8))
    model.unembed.weight = model.embed.weight
    return model


@idiom
def width_equal_to_vocabulary():
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    return holds(tokens=nn.Embedding(64, 64), positions=nn.Embedding(16, 64), blocks=blocks)


@idiom
def keys_as_wide_as_the_vocabulary():
    """A vocabulary of bytes, and a quarter as many key heads as query heads."""
    sizes = {"q": (64, 64), "k": (64, 16), "v": (64, 16), "o": (64, 64)}
    attention = holds(**{name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    block = holds(attention=attention, exit=nn.Linear(64, 16, bias=False))
    return holds(tokens=nn.Embedding(16, 64), blocks=nn.ModuleList([block]), out=nn.Linear(64, 16, bias=False))


@idiom
def bag_of_words():
    return holds(bag=nn.EmbeddingBag(100, 16), up=nn.Linear(16, 24), down=nn.Linear(24, 5))


def swiglu(width, inner, bias=False):
    names = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    return holds(**{name: nn.Linear(*sizes, bias=bias) for name, sizes in names.items()})


@idiom
def swiglu_and_gate():
    layer = holds(gate=nn.Linear(8, 32), up=nn.Linear(8, 32), output=nn.Linear(32, 8))
    layer.moe = holds(gate=nn.Linear(8, 4), experts=nn.ModuleList(swiglu(8, 6) for _ in range(4)))
    return holds(layers=nn.ModuleList([layer]), output=nn.Linear(8, 50))


@idiom
def narrow_experts():
    experts = nn.ModuleList(swiglu(32, 4) for _ in range(8))
    return holds(moe=holds(gate=nn.Linear(32, 8, bias=False), experts=experts))


@idiom
def deep_router():
    router = holds(layer=holds(linear=nn.Linear(16, 6)))
    return holds(moe=holds(router=router, w_in=parameter(6, 24, 16), w_out=parameter(6, 16, 24)))


@idiom
def more_experts_than_width():
    """Stored as (experts, in, out), for `torch.bmm`."""
    experts = holds(up=parameter(40, 16, 24), down=parameter(40, 24, 16))
    return holds(gate=nn.Linear(16, 40, bias=False), experts=experts)


@idiom
def router_without_a_name():
    experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(5))
    return holds(assign=nn.Linear(16, 5), experts=experts)


@idiom
def router_as_parameter():
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
    return holds(w_gate=parameter(16, 5), w_noise=parameter(16, 5), experts=experts)


@idiom
def tall_experts():
    experts = holds(w1=parameter(96, 16), w2=parameter(96, 16))
    experts.num_experts = 4
    return holds(gate=nn.Linear(16, 4, bias=False), experts=experts, body=nn.Linear(16, 16, bias=False))


@idiom
def tokens_and_scales():
    vectors = {"cls_token": (1, 1, 8), "mask_token": (1, 1, 8), "layer_scale": (8, 1, 1), "time_mix": (1, 1, 8)}
    tables = {"registers": (1, 4, 8), "latents": (5, 8), "position_grid": (1, 7, 7, 8), "channel_gain": (1, 8, 1, 1)}
    named = {name: parameter(*shape) for name, shape in (vectors | tables).items()}
    block = holds(body=nn.Linear(8, 8), gate=nn.Linear(8, 1, bias=False))
    return holds(**named, blocks=nn.ModuleList([block]))


@idiom
def torch_attention():
    return holds(attention=nn.MultiheadAttention(16, 2, add_bias_kv=True), norm=nn.LayerNorm(16))


@idiom
def cross_attention():
    return holds(attention=nn.MultiheadAttention(16, 2, kdim=12, vdim=20))


@idiom
def weight_norm():
    conv = parametrizations.weight_norm(nn.Conv1d(8, 8, 3), dim=2)
    old = nn.Linear(8, 8)  # as torch's older function leaves it
    del old.weight
    old.weight_g, old.weight_v = parameter(8, 1), parameter(8, 8)
    fc, table = (parametrizations.weight_norm(layer) for layer in (nn.Linear(8, 32), nn.Embedding(9, 8)))
    return holds(table=table, conv=conv, old=old, fc=fc, body=nn.Linear(32, 8), head=nn.Linear(8, 5))


@idiom
def spectral_norm():
    conv, fc = nn.Conv2d(8, 8, 3), nn.Linear(8, 24)
    conv, fc, head = (parametrizations.spectral_norm(layer) for layer in (conv, fc, nn.Linear(8, 1)))
    orthogonal = parametrizations.orthogonal(nn.Linear(24, 8), use_trivialization=False)
    return holds(conv=conv, fc=fc, orthogonal=orthogonal, head=head)


@idiom
def linear_maps_as_bare_parameters():
    """modded-nanogpt: one stack for queries, keys and values; the MLP's matrices are bare parameters."""
    first = holds(qkv_w=parameter(3, 16, 16), lambdas=parameter(2), c_proj=nn.Linear(16, 16, bias=False))
    later = holds(qkvo_w=parameter(4, 16, 16), attn_gate=nn.Linear(12, 2, bias=False))
    wide = holds(qkvo_w=parameter(16, 64))
    blocks = [holds(attn=attn, mlp=holds(c_fc=parameter(16, 64), c_proj=parameter(16, 64))) for attn in (first, later)]
    blocks.append(holds(attn=wide, mlp=holds(c_fc=parameter(64, 16), c_proj=parameter(64, 16))))
    embed, values = nn.Embedding(50, 16), nn.ModuleList([nn.Embedding(50, 16)])
    return holds(embed=embed, value_embeds=values, blocks=nn.ModuleList(blocks), lm_head=nn.Linear(16, 50))


@idiom
def state_space():
    model = holds(A_log=parameter(32, 16), D=parameter(32), marked=parameter(32, 32))
    model.marked._no_weight_decay = True
    model.conv = nn.Conv1d(32, 32, 4, groups=32)
    model.in_proj, model.out_proj = nn.Linear(16, 64), nn.Linear(32, 16)
    return holds(layers=nn.ModuleList([model]))


@idiom
def relative_positions():
    tables = {"relative_position_bias_table": (49, 4), "rel_pos_h": (13, 8), "attention_bias_table": (4, 64)}
    attention = holds(**{name: parameter(*shape) for name, shape in tables.items()}, qkv=nn.Linear(8, 24))
    return holds(layers=nn.ModuleList([attention]))


@idiom
def numbered_heads():
    trunk = nn.ModuleList(holds(fc1=nn.Linear(16, 32), fc2=nn.Linear(32, 16)) for _ in range(2))
    heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 7)) for _ in range(3))
    return holds(trunk=trunk, heads=heads)


@idiom
def regression():
    return holds(body=nn.Sequential(nn.Linear(1, 16), nn.Linear(16, 16)), value=nn.Linear(16, 1))


@idiom
def depthwise_convolutions():
    return holds(
        dw=nn.Conv2d(16, 16, 3, groups=16),
        multiplied=nn.Conv1d(16, 32, 3, groups=16),
        transposed_dw=nn.ConvTranspose2d(16, 16, 2, groups=16),
        pw=nn.Conv2d(16, 16, 1),
        mono=nn.Conv1d(1, 16, 10),
        grouped=nn.Conv2d(16, 32, 3, groups=4),
        up=nn.ConvTranspose2d(16, 8, 2),
        grouped_up=nn.ConvTranspose2d(16, 32, 2, groups=4),
    )


@idiom
def four_axes():
    return holds(
        blocks=nn.ModuleList([holds(scale=parameter(1, 8, 1, 1), blob=parameter(2, 3, 4, 5), body=nn.Linear(8, 8))])
    )


@idiom
def bilinear():
    return holds(body=nn.Linear(8, 8), pair=nn.Bilinear(8, 8, 4))


@idiom
def learned_inputs_and_a_single_filter():
    parts = {"summary": parameter(1, 4, 8), "squeeze": nn.Conv1d(8, 1, 3, bias=False)}
    return holds(**parts, body=nn.Linear(8, 8, bias=False), mix=nn.Linear(8, 8, bias=False))


@idiom
def heads_on_an_axis():
    attention = holds(w_q=parameter(24, 4, 8), w_k=parameter(24, 4, 8), w_o=parameter(24, 4, 8))
    attention.per_head_weight, attention.per_head_bias = parameter(4, 8, 8), parameter(4, 8)
    attention.in_out_weight, attention.in_out_bias = parameter(4, 8, 6), parameter(4, 6)
    attention.num_heads, attention.head_dim, attention.width = 4, 8, 24
    attention.body = nn.Linear(24, 24, bias=False)
    return attention


class GroupNormalizer(nn.GroupNorm):
    """A name that does not say what the class extends."""


class PerHeadRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = parameter(4, 8)


class NormalizedLinear(nn.Linear):
    """A linear layer that has "norm" in its name."""


class NormHead(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.weight = parameter(vocabulary, width)


class LayerNormLinear(nn.Module):
    """A gain and a matrix in one module, as in fused layers."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.layer_norm_weight = parameter(in_features)
        self.fused_weight = parameter(out_features, in_features)


@idiom
def names_with_norm():
    block = holds(per_head=PerHeadRMSNorm(), group_norm=GroupNormalizer(2, 16), spatial=nn.LayerNorm([16, 4, 4]))
    block.fused, block.normed = LayerNormLinear(16, 32), NormalizedLinear(32, 16)
    return holds(blocks=nn.ModuleList([block]), head=NormHead(16, 50))


@idiom
def linear_layers_called_embed():
    time = nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 16))
    parts = {"token_embed": nn.Embedding(30, 10), "embed_proj": nn.Linear(10, 16), "time_embed": time}
    return holds(**parts, patch_embed=holds(proj=nn.Conv2d(3, 16, 4)), body=nn.Linear(16, 16))


class Dense(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight, self.bias = parameter(fan_out, fan_in), parameter(fan_out)


class InOut(nn.Module):
    """Multiplies `x @ weight`: (in, out)."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight, self.bias = parameter(fan_in, fan_out), parameter(fan_out)


class ParallelEmbedding(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = parameter(rows, width)


@idiom
def own_linear():
    block = holds(dense=Dense(16, 48), conv1d=InOut(48, 16))
    return holds(table=ParallelEmbedding(30, 16), blocks=nn.ModuleList([block]))


@idiom
def recurrent():
    lstm, projected, gru, rnn = nn.LSTM(12, 8), nn.LSTM(8, 8, proj_size=4), nn.GRU(4, 8), nn.RNN(8, 8)
    return holds(lstm=lstm, projected=projected, gru=gru, rnn=rnn, out=nn.Linear(8, 3))


@idiom
def recurrent_cells():
    return holds(lstm=nn.LSTMCell(12, 8), gru=nn.GRUCell(8, 8), rnn=nn.RNNCell(8, 8), out=nn.Linear(8, 3))


@idiom
def adaptive_softmax():
    softmax = nn.AdaptiveLogSoftmaxWithLoss(32, 1000, [100, 500])
    return holds(tokens=nn.Embedding(1000, 32), body=nn.Linear(32, 32, bias=False), softmax=softmax)


@idiom
def diffusion_transformer():
    block = holds(qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16), adaln=nn.Sequential(nn.SiLU(), nn.Linear(16, 96)))
    final = holds(adaln=nn.Sequential(nn.SiLU(), nn.Linear(16, 32)), linear=nn.Linear(16, 12))
    inputs = {"x_embedder": nn.Conv2d(3, 16, 2), "pos_embed": parameter(1, 64, 16), "y_embedder": nn.Embedding(11, 16)}
    time = nn.Sequential(nn.Linear(20, 16), nn.SiLU(), nn.Linear(16, 16))
    return holds(**inputs, t_embedder=time, blocks=nn.ModuleList([block]), final=final)


@idiom
def diffusion_transformer_with_modulation_last(outputs=8):
    """As in DiT-S/4 and DiT-L/8: the output is a third or half as wide, and modulation comes after it."""
    modulation = nn.Sequential(nn.SiLU(), nn.Linear(16, 96))
    block = holds(qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16), adaLN_modulation=modulation)
    final = holds(linear=nn.Linear(16, outputs), adaLN_modulation=nn.Sequential(nn.SiLU(), nn.Linear(16, 32)))
    time = nn.Sequential(nn.Linear(20, 16), nn.SiLU(), nn.Linear(16, 16))
    inputs = {"x_embedder": holds(proj=nn.Conv2d(4, 16, 2)), "t_embedder": holds(mlp=time)}
    return holds(**inputs, blocks=nn.ModuleList([block]), final_layer=final)


@idiom
def diffusion_transformer_of_pixels():
    """A patch has as many values as the model is wide."""
    return diffusion_transformer_with_modulation_last(outputs=16)


@idiom
def diffusion_transformer_of_large_patches():
    """A patch has twice as many values as the model is wide, like a fused projection; the DiT is a submodule."""
    return holds(net=diffusion_transformer_with_modulation_last(outputs=32))


@idiom
def diffusion_transformer_as_wide_as_modulation():
    """A patch has as many values as the blocks' modulation, of which only parts are read."""
    return diffusion_transformer_with_modulation_last(outputs=96)


@idiom
def final_layer_of_two_maps():
    final = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 32))
    return holds(blocks=nn.ModuleList([nn.Linear(16, 16)]), final=final)


@idiom
def flow_inside_a_predictor():
    """The duration predictor of VITS: each flow computes 29 parameters of a spline."""
    flows = [holds(conv_pre=nn.Conv1d(2, 16, 1), conv_proj=nn.Conv1d(16, 29, 1)) for _ in range(4)]
    lists = {"flows": nn.ModuleList(flows[:2]), "post_flows": nn.ModuleList(flows[2:])}
    return holds(duration_predictor=holds(conv_pre=nn.Conv1d(12, 16, 1), **lists), proj=nn.Linear(12, 5))


@idiom
def positions_from_coordinates():
    """As in Swin v2, CoAtNet, timm's own Swin v2 and ConViT."""

    def mlp(heads):
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, heads, bias=False))

    block = holds(cpb_mlp=mlp(2), meta_mlp=mlp(4), rel_pos=holds(mlp=mlp(4)), pos_proj=nn.Linear(3, 4))
    block.qkv, block.proj = nn.Linear(16, 48), nn.Linear(16, 16)
    return holds(blocks=nn.ModuleList([block]), pos_encoder=mlp(16), head=nn.Linear(16, 10))


@idiom
def a_network_of_coordinates():
    """Coordinates as the model's own input: nothing is called a position, so these are hidden matrices."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


@idiom
def autoencoder():
    return nn.Sequential(
        nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 48)
    )


@idiom
def outputs_as_many_as_features():
    """Sixteen classes in a net of width 16: only a name could tell the last layer from the others."""
    return holds(first=nn.Linear(28, 16), second=nn.Linear(16, 16), out=nn.Linear(16, 16))


@idiom
def hand_written_lora():
    layers = [holds(base=nn.Linear(16, 16), lora_A=parameter(4, 16), lora_B=parameter(16, 4)) for _ in range(2)]
    return holds(layers=nn.ModuleList(layers))


class Declares(Holder):
    """The methods by which timm's models declare heads and undecayed parameters."""

    def get_classifier(self):
        return self.out

    def no_weight_decay(self):
        return {"weird"}


@idiom
def declared_classifier():
    return Declares(body=nn.Linear(16, 16), out=nn.Linear(16, 16), weird=parameter(16, 16))


@idiom
def contrastive():
    tower = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    return holds(tower=tower, text_projection=parameter(16, 12), logit_scale=parameter())


@idiom
def heads_as_modules():
    heads = [holds(key=nn.Linear(16, 4), query=nn.Linear(16, 4), value=nn.Linear(16, 4)) for _ in range(4)]
    for head in heads:
        head.__class__ = type(heads[0])
    attention = holds(heads=nn.ModuleList(heads), proj=nn.Linear(16, 16))
    return holds(tokens=nn.Embedding(30, 16), attention=attention, lm_head=nn.Linear(16, 30))


@idiom
def shared_expert_of_equal_size():
    moe = holds(gate=nn.Linear(16, 8, bias=False), experts=nn.ModuleList(swiglu(16, 6) for _ in range(8)))
    moe.shared_expert = swiglu(16, 8)
    return holds(layers=nn.ModuleList([moe]))


@idiom
def upsampling():
    upsample = holds(projection=nn.Linear(16, 32))
    encoder = holds(norm=nn.LayerNorm(16), body=nn.Linear(16, 16), upsample=upsample)
    return holds(encoder=encoder, lm_head=nn.Linear(16, 5))


@idiom
def two_towers():
    towers = {"high": nn.Linear(10, 8), "low": nn.Linear(12, 8), "proj": nn.Linear(16, 24)}
    return holds(tokens=nn.Embedding(30, 24), **towers, lm_head=nn.Linear(24, 30))


@idiom
def mixture_in_one_module():
    layer = holds(gate=nn.Linear(16, 4, bias=False), dense=nn.Linear(16, 16, bias=False))
    layer.w_up, layer.w_down, layer.num_experts = parameter(4, 24, 16), parameter(4, 16, 24), 4
    return holds(tokens=nn.Embedding(30, 16), layers=nn.ModuleList([layer]), lm_head=nn.Linear(16, 30, bias=False))


@idiom
def mixture_at_the_top():
    stacks = {"up": parameter(4, 24, 16), "down": parameter(4, 16, 24), "gate_weight": parameter(4, 16)}
    return holds(**stacks, body=nn.Linear(16, 16, bias=False), out=nn.Linear(16, 4, bias=False))
