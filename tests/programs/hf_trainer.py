"""Hugging Face's Trainer with a small causal language model and random tokens.

python hf_trainer.py [OUTPUT_FOLDER]
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 64


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 1000, (LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=LENGTH))
arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "out",
    per_device_train_batch_size=4,
    max_steps=8,
    bf16=torch.cuda.is_available(),
    logging_steps=1,
    report_to=[],
    dataloader_num_workers=1,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
trainer.train()
