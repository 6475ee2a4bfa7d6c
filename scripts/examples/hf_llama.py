"""A Llama of Hugging Face on meta tensors: reading a padded batch, and generating from it.

    pip install transformers
    python scripts/examples/hf_llama.py

No weights are loaded and nothing is downloaded: the config says it all. Token ids and mask are real tensors that
`on_meta` brings in, so that the model can look at their values: whether anything is masked decides how attention runs.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from transformers import LlamaConfig, LlamaForCausalLM

from flopmeter import FlopMeter, on_meta, time_generation

HARDWARE = "h100-sxm5-80gb"
BATCH, LENGTH, NEW_TOKENS = 4, 512, 8
LLAMA_3_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
)  # fmt: skip


@torch.no_grad()
def main() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).bfloat16().eval()
    ids = torch.randint(5, 1000, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :100] = 0  # the first prompt is shorter, padded on the left

    with FlopMeter(HARDWARE) as meter:
        model(on_meta(ids), attention_mask=on_meta(mask))
    print(meter.report())

    def generate(tokens: int) -> None:
        length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        model.generate(on_meta(ids), attention_mask=on_meta(mask), do_sample=False, pad_token_id=0, **length)

    timed = time_generation(generate, NEW_TOKENS, HARDWARE, sequences=BATCH)
    rows = [
        ("time to the first token, ms", timed.first_token_seconds * 1e3),
        ("each token after it, ms", timed.token_seconds * 1e3),
        ("tokens per second, all sequences", timed.tokens_per_s),
    ]
    print(f"\ngenerating\n\n{tabulate(rows, floatfmt='.1f')}\n\nassumed: {'; '.join(timed.whole.assumptions)}")


if __name__ == "__main__":
    main()
