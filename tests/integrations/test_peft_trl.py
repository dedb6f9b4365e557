"""PEFT's LoRA and TRL's SFTTrainer."""

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("trl")
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from muonsw import MuonSW
from muonsw.integrations.transformers import TelemetryCallback, for_model
from tests.integrations.models import MODELS, Tokens

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
BY_MUON = {"role:lora": {"algorithm": "muon", "weight_decay": 0.1}}


def adapted(**more):
    torch.manual_seed(0)
    return get_peft_model(MODELS["llama"](), LoraConfig(**LORA, **more))


def steps(model, optimizer, count=3):
    batch = {key: value[None] for key, value in Tokens()[0].items()}
    for _ in range(count):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_muon_on_factors_moves_a_factor_that_starts_at_zero_and_never_the_base():
    model = adapted()
    optimizer = MuonSW.for_model(model, lr=0.01, patterns=BY_MUON)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    steps(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) != ("lora_" in name), name


def test_decay_leaves_a_factor_at_zero_where_it_is():
    """B starts at zero, so decay first shrinks A alone, and with it the product."""
    model = adapted()
    optimizer = MuonSW.for_model(model, lr=0.01, patterns=BY_MUON)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    before = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    optimizer.step()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            assert not param.any()
        elif "lora_A" in name:
            torch.testing.assert_close(param.detach(), before[name] * (1 - 0.1 * 0.01))


def tokenizer():
    vocabulary = {f"w{number}": number for number in range(30)} | {"<pad>": 30, "<eos>": 31}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def sft(folder):
    torch.manual_seed(0)
    return SFTTrainer(
        model=MODELS["llama"](),
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=4,
            per_device_train_batch_size=2,
            lr_scheduler_type="cosine",
            warmup_steps=1,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            max_length=16,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"text": [f"w{n} w{n + 1} w{n + 2} w{n}" for n in range(16)]}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
        optimizer_cls_and_kwargs=for_model(lr=0.01, patterns=BY_MUON),
    )


def test_sft_with_lora_resumes_bit_for_bit(tmp_path):
    whole = sft(tmp_path)
    callback = TelemetryCallback(whole, every=2)
    whole.add_callback(callback)
    whole.train()
    assert [record["step"] for record in callback.telemetry.records] == [1, 2, 4]
    assert "telemetry/lora/weight_rms" in {key for entry in whole.state.log_history for key in entry}
    resumed = sft(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    other = dict(resumed.model.named_parameters())
    for name, param in whole.model.named_parameters():
        assert torch.equal(param, other[name]), name
