"""Hugging Face models as their users run them: masks, generation, autocast."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flopmeter import FlopMeter, on_meta  # noqa: E402
from flopmeter.ask.generation import time_generation  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(**SMALL)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def prompt(batch=2, length=16):
    ids = torch.randint(5, 1000, (batch, length))
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("kind", ["Bert", "Llama", "GPT2", "Qwen3", "T5"])
def test_products_on_meta_are_those_of_real_tensors_with_the_same_mask(kind):
    """A padded mask must lead to the same attention as on real tensors."""
    ids, mask = prompt()
    mask[0, :4] = 0
    config = transformers.AutoConfig.for_model(kind.lower(), **(SMALL if kind not in ("GPT2", "T5") else {}))
    config._attn_implementation = "sdpa" if kind != "T5" else "eager"
    if kind in ("GPT2", "T5"):
        config.num_hidden_layers = 2
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config).eval()
    real = transformers.AutoModel.from_config(config).eval()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "T5":
        inputs["decoder_input_ids"] = ids
    macs = []
    for program in (real, model):
        with FlopMeter("a100-sxm4-80gb", as_cuda=False) as meter, torch.no_grad():
            program(**(inputs if program is real else on_meta(inputs)))
        macs.append(meter.report().macs)
    assert macs[0] == macs[1] > 0


def test_greedy_generation_runs_and_says_what_it_assumed(llama):
    ids, mask = prompt()
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        length = {"min_new_tokens": 5, "max_new_tokens": 5}
        out = llama.generate(on_meta(ids), attention_mask=on_meta(mask), do_sample=False, pad_token_id=0, **length)
    assert out.shape == (2, 16 + 5)
    (assumption,) = meter.report().assumptions
    assert assumption.startswith("generation: no sequence ends before max_new_tokens")


def test_a_model_with_weights_generates_under_a_meter_what_it_does_without():
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    ids, _ = prompt(batch=1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = real.generate(ids, **options)
    with FlopMeter("h100-sxm5-80gb"):
        assert real.generate(ids, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beam_search_goes_on_to_its_last_token_with_the_products_of_a_real_one(early_stopping):
    config = transformers.BartConfig(
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        vocab_size=300,
        attn_implementation="eager",
    )
    options = {"num_beams": 3, "min_new_tokens": 6, "max_new_tokens": 6, "early_stopping": early_stopping}
    ids = torch.randint(5, 300, (2, 12))
    real = transformers.BartForConditionalGeneration(config).eval()
    with torch.device("meta"):
        model = transformers.BartForConditionalGeneration(config).eval()
    with FlopCounterMode(display=False) as counter:
        expected = real.generate(ids, **options)
    with FlopMeter("h100-sxm5-80gb") as meter:
        out = model.generate(on_meta(ids), **options)
    assert 2 * meter.report().macs == counter.get_total_flops()
    assert out.shape == expected.shape
    assert any("beam search" in line for line in meter.report().assumptions)


def test_a_token_takes_less_than_the_prompt_and_reads_every_weight(llama):
    ids, mask = prompt()

    def generate(tokens):
        llama.generate(
            on_meta(ids),
            attention_mask=on_meta(mask),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    timed = time_generation(generate, 4, "a100-sxm4-80gb", sequences=2)
    per_token_bytes = (timed.whole.bytes_read - timed.first_token.bytes_read) / 3
    weights = sum(p.numel() * 2 for name, p in llama.named_parameters() if "embed" not in name)
    assert weights < per_token_bytes < 3 * weights
    assert timed.tokens_per_s == pytest.approx(2 / timed.token_seconds)
    with pytest.raises(ValueError, match="at least two"):
        time_generation(generate, 1, "t4")


def test_a_training_step_under_autocast_with_checkpointing_is_counted_whole(llama):
    config = transformers.LlamaConfig(**SMALL)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    ids, mask = prompt()
    with FlopMeter("a100-sxm4-80gb", strict=True) as meter:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(on_meta(ids), attention_mask=on_meta(mask), labels=on_meta(ids)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    report = meter.report()
    assert report.main_dtype == "bf16"
    assert {row.name for row in report.rows("phase")} == {"forward", "recompute", "backward", "optimizer"}


def test_decoding_with_a_static_cache_compiles_the_steps_after_the_first(llama):
    """As transformers does on CUDA: of four tokens the prompt gives the first, three steps of one graph the others."""
    ids, mask = prompt()
    length = {"min_new_tokens": 4, "max_new_tokens": 4}
    with FlopMeter("h100-sxm5-80gb") as meter:
        llama.generate(
            on_meta(ids), attention_mask=on_meta(mask), do_sample=False, pad_token_id=0, cache_implementation="static",
            **length,
        )  # fmt: skip
    report = meter.report()
    assert [(graph.part, graph.calls, len(graph.breaks)) for graph in report.graphs] == [("inference", 3, 0)]
    assert not meter.trace.compilation.failures
    assert llama.generation_config.compile_config is None
    with FlopMeter("h100-sxm5-80gb") as meter:
        llama.generate(
            on_meta(ids), attention_mask=on_meta(mask), do_sample=False, pad_token_id=0, cache_implementation="static",
            disable_compile=True, **length,
        )  # fmt: skip
    eager = meter.report()
    assert not eager.graphs
    assert eager.macs == report.macs


GENERATES = """
import transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=1000, eos_token_id=0)
model = transformers.LlamaForCausalLM(config).eval().cuda()
import torch
print(model.generate(torch.full((1, 16), 7, device="cuda"), max_new_tokens=5, do_sample=False).shape)
"""


def test_a_script_that_imports_transformers_under_the_run_generates_to_its_last_token(tmp_path):
    """In a process of its own: here transformers is imported already. Without the patch it never ends, or at once if
    the first token, which is 0 where tokens take turns, is the last."""
    script = tmp_path / "generates.py"
    script.write_text(GENERATES)
    command = [sys.executable, "-m", "flopmeter", "run", "--hardware", "l4", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ran.stdout == "torch.Size([1, 21])\n", ran.stderr
    assert "the last of 5 (marked by calls of LlamaForCausalLM)" in ran.stderr
    assert "no sequence ends before max_new_tokens" in ran.stderr


SPECULATES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model(layers):
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=1000, eos_token_id=2)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).eval().cuda()

for sampled in (False, True):
    ids = torch.randint(5, 1000, (1, 16)).cuda()
    print(model(2).generate(ids, assistant_model=model(1), max_new_tokens=12, do_sample=sampled).shape)
"""


def test_a_script_that_speculates_with_a_draft_looks_for_the_end_in_what_was_accepted(tmp_path):
    """transformers copies its settings, the tokens that end a sequence among them, and finds their places."""
    script = tmp_path / "speculates.py"
    script.write_text(SPECULATES)
    command = [sys.executable, "-m", "flopmeter", "run", "--hardware", "l4", "--steps", "100", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ran.stdout == "torch.Size([1, 28])\n" * 2, ran.stderr
    assert "marked by calls of LlamaForCausalLM" in ran.stderr
