"""Hugging Face's Trainer with Muon-SW: one argument for the optimizer and one line for telemetry.

Run it: `pip install transformers accelerate`, then `python examples/hugging_face_trainer.py`. The model is a tiny
Llama with random weights, so nothing is downloaded.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from muonsw import MuonSW
from muonsw.integrations.transformers import TelemetryCallback, for_model


class Repeats(torch.utils.data.Dataset):
    """Sequences whose second half repeats the first, so there is something to learn."""

    def __init__(self, size: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        halves = torch.randint(64, (size, 8), generator=generator)
        self.tokens = torch.cat([halves, halves], dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def main(steps: int = 60) -> tuple[list[float], MuonSW]:
    """Train, and return the logged losses and the optimizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            warmup_steps=5,
            lr_scheduler_type="cosine",
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        # The Trainer creates the scheduler; this learning rate is the peak that decay divides by.
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Repeats(),
            optimizer_cls_and_kwargs=for_model(lr=0.02, weight_decay=0.1),
        )
        trainer.add_callback(TelemetryCallback(trainer, every=20))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss from {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses, trainer.optimizer.optimizer


if __name__ == "__main__":
    main()
