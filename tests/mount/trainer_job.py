"""A tiny Hugging Face Trainer run that keeps two checkpoints: trainer_job.py DIR.

Trains, says so, waits for a line and trains on from the newest checkpoint with a new model.
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

TRAINED = "first part done"


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 16) % 64
        return {"input_ids": ids, "labels": ids}


def train(top: str, resume: bool) -> None:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=top,
        max_steps=12 if resume else 8,
        save_steps=2,
        save_total_limit=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=["tensorboard"],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume or None)
    assert trainer.state.global_step == arguments.max_steps


if __name__ == "__main__":
    train(sys.argv[1], resume=False)
    print(TRAINED, flush=True)
    sys.stdin.readline()
    train(sys.argv[1], resume=True)
