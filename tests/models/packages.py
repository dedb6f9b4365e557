"""Small versions of models from transformers, timm, torchvision and PEFT, built on the meta device.

The packages are imported inside functions, since only `make test-models` and `make test-integrations` install them.
"""

import importlib.util
import warnings

import torch
from torch.library import Library

PACKAGES = ("peft", "timm", "torchvision", "transformers")

# A CUDA build of torchvision cannot load its compiled operators with a CPU build of torch. We run no model, so it is
# enough to define the operators that torchvision annotates at import.
COMPILED_OPERATORS = ("nms", "qnms")
_libraries = []


def missing():
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def prepare():
    """Make the packages importable; called once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        operators = Library("torchvision", "DEF")
        for name in COMPILED_OPERATORS:
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(operators)
    import transformers

    transformers.logging.set_verbosity_error()


def build(file, name):
    """Build a model on the meta device."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        return BUILDERS[file](name)


def from_timm(name):
    import timm

    return timm.create_model(name, num_classes=10)


def from_torchvision(name):
    from torchvision.models import get_model

    options = {} if name == "raft_small" else {"num_classes": 10}
    if name in ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "ssd300_vgg16", "retinanet_resnet50_fpn"):
        options["weights_backbone"] = None
    if name in ("deeplabv3_resnet50", "lraspp_mobilenet_v3_large"):
        options |= {"weights_backbone": None} | ({"aux_loss": True} if name.startswith("deeplab") else {})
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    return get_model(name, weights=None, **options)


def from_transformers(name):
    import transformers

    model, config, options = TRANSFORMERS[name]
    options = options() if callable(options) else options
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def from_peft(name):
    import peft

    base, kind, options = PEFT[name]
    return peft.get_peft_model(from_transformers(base), getattr(peft, kind)(**options))


BUILDERS = {
    "decoders": from_transformers,
    "encoders": from_transformers,
    "vision": from_transformers,
    "timm": from_timm,
    "torchvision": from_torchvision,
    "peft": from_peft,
}

# Sizes differ wherever a real model's would, so that no role is right or wrong by accident.
SMALL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 250,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
DECODER = GROUPED | {"head_dim": 16}
VISION = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 250, "n_positions": 40}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 112, "num_heads": 4, "vocab_size": 250}
TWO_SIDED = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 112, "decoder_ffn_dim": 112,
}  # fmt: skip
SPEECH = SMALL | {
    "vocab_size": 30, "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def _resnet():
    from transformers import ResNetConfig

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 24, 40, 48], "depths": [1, 1, 1, 1]}
    return ResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])


def _detector(**options):
    return lambda: TWO_SIDED | {
        "backbone_config": _resnet(), "num_queries": 20, "num_labels": 10, "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None, **options,
    }  # fmt: skip


DEEPSEEK = {
    "hidden_size": 64, "intermediate_size": 112, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 250,
}  # fmt: skip
DBRX = {
    "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 250, "max_seq_len": 40,
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
}  # fmt: skip
ZAMBA2 = {
    "hidden_size": 64, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 112, "vocab_size": 250,
    "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 32, "num_mem_blocks": 1,
}  # fmt: skip
SAM = {
    "vision_config": {
        "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
        "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 112, "num_pos_feats": 16,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 16},
    "mask_decoder_config": {
        "hidden_size": 32, "mlp_dim": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 40,
    },
}  # fmt: skip
VITS = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 56,
    "flow_size": 32, "spectrogram_bins": 33, "prior_encoder_num_flows": 2, "prior_encoder_num_wavenet_layers": 2,
    "posterior_encoder_num_wavenet_layers": 2, "upsample_initial_channel": 64,
    "duration_predictor_filter_channels": 24, "num_speakers": 3, "speaker_embedding_size": 20,
    "use_stochastic_duration_prediction": False,
}  # fmt: skip
OPT = {
    "hidden_size": 64, "ffn_dim": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 250,
    "max_position_embeddings": 40,
}  # fmt: skip
WHISPER = TWO_SIDED | {
    "vocab_size": 250, "num_mel_bins": 20, "max_source_positions": 40, "max_target_positions": 30, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
GEMMA3N = DECODER | {
    "vocab_size_per_layer_input": 240, "hidden_size_per_layer_input": 20, "laurel_rank": 10,
    "num_kv_shared_layers": 1, "layer_types": ["full_attention", "full_attention"],
    "activation_sparsity_pattern": None,
}  # fmt: skip
BLIP2 = {
    "vision_config": VISION,
    "qformer_config": SMALL | {"hidden_size": 48, "encoder_hidden_size": 64},
    "text_config": OPT | {"model_type": "opt", "word_embed_proj_dim": 64},
    "num_query_tokens": 9,
}
JETMOE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 48,
    "num_local_experts": 6, "num_experts_per_tok": 2, "vocab_size": 250,
}  # fmt: skip
MAMBA2 = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 250, "state_size": 16, "num_heads": 8, "head_dim": 16,
    "n_groups": 2,
}  # fmt: skip
PERCEIVER = {
    "num_latents": 20, "d_latents": 64, "d_model": 48, "num_blocks": 1, "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "vocab_size": 250, "max_position_embeddings": 40,
}  # fmt: skip
PATCHTST = {
    "num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 64,
    "num_attention_heads": 4, "ffn_dim": 112, "num_hidden_layers": 2, "prediction_length": 12,
}  # fmt: skip
SERIES = TWO_SIDED | {
    "prediction_length": 12, "context_length": 24, "d_model": 32, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56,
    "num_static_categorical_features": 1, "cardinality": [5], "embedding_dimension": [4],
}  # fmt: skip
RECURRENT_GEMMA = DECODER | {"num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64}
DEBERTA = SMALL | {
    "num_labels": 5, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16,
    "conv_kernel_size": 3, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
FUNNEL = {
    "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 112, "block_sizes": [1, 1], "num_decoder_layers": 1,
    "vocab_size": 250,
}  # fmt: skip
MODERNBERT = SMALL | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
BEIT = VISION | {
    "num_labels": 10, "use_relative_position_bias": True, "use_mask_token": True,
    "use_absolute_position_embeddings": True,
}  # fmt: skip
STAGES = {"hidden_sizes": [16, 24, 40, 48], "num_labels": 10}
SWIN = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "window_size": 4, "image_size": 64}
LEVIT = {
    "image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1],
    "key_dim": [8, 8, 8], "num_labels": 10,
}  # fmt: skip
DPT = VISION | {
    "backbone_out_indices": [0, 1, 1, 1], "neck_hidden_sizes": [16, 24, 40, 48], "fusion_hidden_size": 32,
}  # fmt: skip
VIDEOMAE = VISION | {
    "num_frames": 4, "tubelet_size": 2, "decoder_hidden_size": 48, "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 4, "decoder_intermediate_size": 80,
}  # fmt: skip
MOBILEVIT = {
    "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 12, 16, 20, 24, 28, 64], "num_labels": 10,
    "image_size": 64,
}  # fmt: skip
TOWERS = {"text_config": SMALL | {"max_position_embeddings": 20}, "vision_config": VISION}
QUANTIZER = {"codevector_dim": 24, "proj_codevector_dim": 24, "num_codevectors_per_group": 20}
SPARSE_LAYERS = {
    "num_layers": 4, "num_decoder_layers": 4, "num_experts": 6, "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
}  # fmt: skip
EIGHT_LAYERS = GROUPED | {"num_hidden_layers": 8, "num_experts": 6}
NLLB = TWO_SIDED | {"vocab_size": 250, "num_experts": 6, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 250, "state_size": 16}
RWKV = {"hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 250}
XLNET = {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 112, "vocab_size": 250}
ERNIE = GROUPED | {"moe_num_experts": 6, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
BART = TWO_SIDED | {"vocab_size": 250, "num_labels": 3, "max_position_embeddings": 40}
MUSICGEN = {
    "hidden_size": 64, "ffn_dim": 112, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 250,
    "num_codebooks": 4,
}  # fmt: skip
ENCODEC = {"num_filters": 8, "hidden_size": 32, "codebook_size": 64, "upsampling_ratios": [4, 2], "num_lstm_layers": 2}
XLSTM = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 250}
DINO = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
SHARED_EXPERT = {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
DISTILBERT = {"dim": 64, "hidden_dim": 112, "n_layers": 2, "n_heads": 4, "vocab_size": 250}

TRANSFORMERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-double-heads": ("GPT2DoubleHeadsModel", "GPT2Config", GPT2 | {"num_labels": 1}),
    "llama-classification": ("LlamaForSequenceClassification", "LlamaConfig", DECODER | {"num_labels": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 6}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | {"num_experts": 80, "moe_intermediate_size": 24}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", DECODER | SHARED_EXPERT),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", GROUPED | {"num_experts": 6}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"num_layers": 2}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 250}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", DECODER | {"num_local_experts": 6}),
    "dbrx": ("DbrxForCausalLM", "DbrxConfig", DBRX),
    "switch-transformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5 | SPARSE_LAYERS,
    ),
    "nllb-moe": ("NllbMoeForConditionalGeneration", "NllbMoeConfig", NLLB),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", JETMOE),
    "granite-moe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", GROUPED | {"num_local_experts": 6}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        DECODER | {"intermediate_size_mlp": 128, "num_local_experts": 6},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED | {"pad_token_id": 0}),
    "ernie4.5-moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", ERNIE),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", MAMBA2),
    "jamba": ("JambaForCausalLM", "JambaConfig", EIGHT_LAYERS),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", RWKV),
    "recurrent-gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", RECURRENT_GEMMA),
    "xlnet": ("XLNetForSequenceClassification", "XLNetConfig", XLNET),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED | {"use_qk_norm": True}),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", ZAMBA2),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT | {"word_embed_proj_dim": 32}),
    "xlstm": ("xLSTMForCausalLM", "xLSTMConfig", XLSTM),
    "bert-pretraining": ("BertForPreTraining", "BertConfig", SMALL),
    "bert-questions": ("BertForQuestionAnswering", "BertConfig", SMALL),
    "roberta-classification": ("RobertaForSequenceClassification", "RobertaConfig", SMALL | {"num_labels": 3}),
    "distilbert-questions": ("DistilBertForQuestionAnswering", "DistilBertConfig", DISTILBERT),
    "deberta-v2": ("DebertaV2ForTokenClassification", "DebertaV2Config", DEBERTA),
    "electra": ("ElectraForPreTraining", "ElectraConfig", SMALL | {"embedding_size": 32}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", SMALL | {"embedding_size": 32}),
    "bart-classification": ("BartForSequenceClassification", "BartConfig", BART),
    "funnel": ("FunnelForTokenClassification", "FunnelConfig", FUNNEL),
    "modernbert-classification": ("ModernBertForSequenceClassification", "ModernBertConfig", MODERNBERT),
    "esm": ("EsmForMaskedLM", "EsmConfig", SMALL | {"max_position_embeddings": 40, "pad_token_id": 1}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "wav2vec2-pretraining": ("Wav2Vec2ForPreTraining", "Wav2Vec2Config", SPEECH | QUANTIZER),
    "wavlm-classification": (
        "WavLMForSequenceClassification",
        "WavLMConfig",
        SPEECH | {"classifier_proj_size": 24, "use_weighted_layer_sum": True, "num_labels": 4},
    ),
    "musicgen-decoder": ("MusicgenForCausalLM", "MusicgenDecoderConfig", MUSICGEN),
    "perceiver": ("PerceiverForMaskedLM", "PerceiverConfig", PERCEIVER),
    "vits": ("VitsModel", "VitsConfig", VITS),
    "vits-stochastic": ("VitsModel", "VitsConfig", VITS | {"use_stochastic_duration_prediction": True}),
    "encodec": ("EncodecModel", "EncodecConfig", ENCODEC),
    "patchtst": ("PatchTSTForPrediction", "PatchTSTConfig", PATCHTST),
    "time-series-transformer": ("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", SERIES),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION | {"num_labels": 10}),
    "deit-distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", VISION | {"num_labels": 10}),
    "beit": ("BeitForImageClassification", "BeitConfig", BEIT),
    "dinov2-registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        DINO | {"num_labels": 10, "use_swiglu_ffn": True},
    ),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", STAGES | {"depths": [1, 1, 2, 1]}),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN | {"num_labels": 10}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        STAGES | {"depths": [1, 1, 1, 1], "decoder_hidden_size": 56},
    ),
    "detr": ("DetrForObjectDetection", "DetrConfig", _detector()),
    "deformable-detr": (
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        _detector(with_box_refine=True, two_stage=True),
    ),
    "clip": ("CLIPModel", "CLIPConfig", TOWERS | {"projection_dim": 48}),
    "siglip": ("SiglipModel", "SiglipConfig", TOWERS),
    "blip-2": ("Blip2ForConditionalGeneration", "Blip2Config", BLIP2),
    "sam": ("SamModel", "SamConfig", SAM),
    "levit": ("LevitForImageClassificationWithTeacher", "LevitConfig", LEVIT),
    "dpt": ("DPTForDepthEstimation", "DPTConfig", DPT),
    "videomae-pretraining": ("VideoMAEForPreTraining", "VideoMAEConfig", VIDEOMAE),
    "mobilevit-segmentation": ("MobileViTForSemanticSegmentation", "MobileViTConfig", MOBILEVIT),
    # base models of adapters, without tables of their own
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
}

PROJECTIONS = ["q_proj", "v_proj"]
PEFT = {
    # also trains the full embedding rows of two tokens
    "lora-llama": ("llama", "LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "trainable_token_indices": [7, 9]}),
    # the new head is trained in full, under modules_to_save
    "lora-roberta-classification": (
        "roberta-classification",
        "LoraConfig",
        {"r": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
    ),
    "lora-saved-embeddings": (
        "llama",
        "LoraConfig",
        {"r": 4, "target_modules": PROJECTIONS, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "lora-embedding": ("llama", "LoraConfig", {"r": 4, "target_modules": [*PROJECTIONS, "embed_tokens"]}),
    "dora": ("llama", "LoraConfig", {"r": 4, "target_modules": PROJECTIONS, "use_dora": True}),
    "lora-convolution": (
        "vit",
        "LoraConfig",
        {"r": 4, "target_modules": ["projection", "q_proj"], "modules_to_save": ["classifier"]},
    ),
    "loha": ("llama", "LoHaConfig", {"r": 4, "target_modules": PROJECTIONS}),
    "ia3": ("llama", "IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt-tuning": ("llama", "PromptTuningConfig", {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}),
}
