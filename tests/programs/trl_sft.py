"""Supervised fine-tuning with trl's SFTTrainer on tokens that are there already."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {f"w{number}": number for number in range(498)} | {"<pad>": 498, "</s>": 499}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="</s>"
)
config = LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=500, pad_token_id=498
)
data = Dataset.from_list([{"input_ids": list(range(32))} for _ in range(64)])
arguments = SFTConfig(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "out",
    per_device_train_batch_size=4,
    max_steps=8,
    logging_steps=1,
    report_to=[],
    bf16=torch.cuda.is_available(),
)
SFTTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, processing_class=tokenizer).train()
