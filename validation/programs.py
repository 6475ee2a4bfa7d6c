"""32 programs as people write them, on the device named cuda: python programs.py NAME runs three steps of one.

Each trains or infers with random weights and inputs. What an H100 took for a step stands in programs.csv: they were
written before anything was predicted of them, and set no constant until then. They need transformers, timm and peft.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

dev, bf16 = "cuda", torch.bfloat16
P = {}


def program(f):
    P[f.__name__] = f
    return f


def train(model, loss_of, optimizer=None, autocast=bf16, compiled=False):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()
    if compiled:
        model = torch.compile(model)

    def step():
        if autocast is None:
            loss = loss_of(model)
        else:
            with torch.autocast(dev, autocast):
                loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_language_model(model, batch, length, **options):
    """In bf16, without autocast."""
    x = ids(batch, length)
    return train(model, lambda m: m(input_ids=x, labels=x).loss, autocast=None, **options)


def infer(model, *a, compiled=None, dtype=None, **k):
    model.eval().requires_grad_(False)
    if compiled:
        model = torch.compile(model, mode=None if compiled is True else compiled)

    def step():
        with torch.no_grad():
            if dtype is not None:
                with torch.autocast(dev, dtype):
                    return model(*a, **k)
            return model(*a, **k)

    return step


def ids(b, s, v=30000):
    return torch.randint(0, v, (b, s), device=dev)


@program
def t5_base_train():
    from transformers import T5Config, T5ForConditionalGeneration

    m = T5ForConditionalGeneration(
        T5Config(
            d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0, use_cache=False
        )
    ).to(dev)
    x, y = ids(16, 512), ids(16, 128)
    return train(m, lambda m: m(input_ids=x, labels=y).loss)


@program
def whisper_small_infer():
    from transformers import WhisperConfig, WhisperModel

    c = WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        use_cache=False,
    )
    m = WhisperModel(c).to(dev, torch.float16)
    x = torch.randn(8, 80, 3000, device=dev, dtype=torch.float16)
    return infer(m, input_features=x, decoder_input_ids=ids(8, 64))


@program
def mistral_window_prefill():
    from transformers import MistralConfig, MistralForCausalLM

    c = MistralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=1024,
        use_cache=False,
    )
    m = MistralForCausalLM(c).to(dev, bf16)
    return infer(m, input_ids=ids(1, 4096), logits_to_keep=1)


@program
def mixtral_small_train():
    from transformers import MixtralConfig, MixtralForCausalLM

    c = MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return train_language_model(MixtralForCausalLM(c).to(dev, bf16), 4, 1024)


@program
def clip_large_infer():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    c = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=224,
        patch_size=14,
    )
    m = CLIPVisionModel(c).to(dev, torch.float16)
    return infer(m, pixel_values=torch.randn(64, 3, 224, 224, device=dev, dtype=torch.float16))


@program
def wav2vec2_train():
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    m = Wav2Vec2Model(Wav2Vec2Config(mask_time_prob=0.0, mask_feature_prob=0.0, layerdrop=0.0)).to(dev)
    x = torch.randn(8, 160000, device=dev)
    return train(m, lambda m: m(x).last_hidden_state.float().pow(2).mean())


def classifier(name, batch, size=224, channels_last=False, compiled=False, autocast=bf16, **k):
    import timm

    m = timm.create_model(name, pretrained=False, **k).to(dev)
    x, y = torch.randn(batch, 3, size, size, device=dev), torch.randint(0, 1000, (batch,), device=dev)
    if channels_last:
        m, x = m.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    return train(m, lambda m: F.cross_entropy(m(x), y), o, autocast, compiled)


@program
def efficientnet_b0_train():
    return classifier("efficientnet_b0", 128)


@program
def efficientnet_b0_nhwc_train():
    return classifier("efficientnet_b0", 128, channels_last=True)


@program
def resnet18_tf32_train():
    torch.backends.cuda.matmul.allow_tf32 = True
    return classifier("resnet18", 256, channels_last=True, autocast=None)


@program
def densenet121_train():
    return classifier("densenet121", 64, channels_last=True)


@program
def deit_small_train_compiled():
    return classifier("deit_small_patch16_224", 128, compiled=True)


@program
def resnet50_infer_compiled():
    import timm

    m = timm.create_model("resnet50", pretrained=False).to(dev, memory_format=torch.channels_last)
    x = torch.randn(128, 3, 224, 224, device=dev).to(memory_format=torch.channels_last)
    return infer(m, x, compiled=True, dtype=torch.float16)


@program
def vit_large_infer():
    import timm

    m = timm.create_model("vit_large_patch16_224", pretrained=False).to(dev)
    return infer(m, torch.randn(64, 3, 224, 224, device=dev), dtype=bf16)


@program
def swinv2_tiny_infer():
    import timm

    m = timm.create_model("swinv2_tiny_window8_256", pretrained=False).to(dev)
    return infer(m, torch.randn(64, 3, 256, 256, device=dev), dtype=bf16)


class Block(nn.Module):
    def __init__(self, d=768, h=12):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.h, d // self.h).transpose(1, 2) for t in self.qkv(self.n1(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class NanoGPT(nn.Module):
    def __init__(self, v=50304, d=768, layers=12, h=12, s=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(v, d), nn.Embedding(s, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.n, self.head = nn.LayerNorm(d, bias=False), nn.Linear(d, v, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for b in self.blocks:
            h = b(h)
        logits = self.head(self.n(h))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


@program
def nanogpt_train():
    m = NanoGPT().to(dev)
    x = ids(12, 1024)
    return train(m, lambda m: m(x, x))


@program
def nanogpt_train_compiled():
    m = NanoGPT().to(dev)
    x = ids(12, 1024)
    return train(m, lambda m: m(x, x), compiled=True)


@program
def gpt_medium_train_compiled():
    m = NanoGPT(d=1024, layers=24, h=16).to(dev)
    x = ids(8, 1024)
    return train(m, lambda m: m(x, x), compiled=True)


def bert(mask, compiled, layers=12, b=32, s=384):
    from transformers import BertConfig, BertForSequenceClassification

    m = BertForSequenceClassification(BertConfig(num_hidden_layers=layers)).to(dev)
    x, y = ids(b, s), torch.randint(0, 2, (b,), device=dev)
    k = {}
    if mask:
        a = torch.ones(b, s, dtype=torch.long, device=dev)
        a[:, s - 64 :] = 0
        k["attention_mask"] = a
    return train(m, lambda m: m(input_ids=x, labels=y, **k).loss, compiled=compiled)


@program
def bert_train():
    return bert(False, False)


@program
def bert_train_compiled():
    return bert(False, True)


@program
def bert_mask_train():
    return bert(True, False)


@program
def bert_mask_train_compiled():
    return bert(True, True)


def llama(layers=8, d=2048, ff=8192, h=32, kv=8, **k):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = LlamaConfig(
        hidden_size=d,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=h,
        num_key_value_heads=kv,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
        **k,
    )
    return LlamaForCausalLM(c).to(dev, bf16)


@program
def llama_train():
    return train_language_model(llama(), 4, 2048)


@program
def llama_train_compiled():
    return train_language_model(llama(), 4, 2048, compiled=True)


@program
def llama_lora_checkpoint_train():
    from peft import LoraConfig, get_peft_model

    m = get_peft_model(llama(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    m.enable_input_require_grads()
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    o = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-4)
    return train_language_model(m, 4, 2048, optimizer=o)


def decode(b, ctx, layers, d, ff, h, kv):
    from transformers import DynamicCache

    m = llama(layers, d, ff, h, kv).eval().requires_grad_(False)
    m.config.use_cache = True
    cache = DynamicCache(config=m.config)
    for i in range(layers):
        cache.update(
            torch.randn(b, kv, ctx, d // h, device=dev, dtype=bf16),
            torch.randn(b, kv, ctx, d // h, device=dev, dtype=bf16),
            i,
        )
    x = ids(b, 1)

    def step():
        with torch.no_grad():
            out = m(input_ids=x, past_key_values=cache, use_cache=True)
            n = out.logits[:, -1].argmax(-1)
            cache.crop(-1)
            return n

    return step


@program
def llama8b_decode1_ctx4096():
    return decode(1, 4096, 8, 4096, 14336, 32, 8)


@program
def llama8b_decode16_ctx2048():
    return decode(16, 2048, 8, 4096, 14336, 32, 8)


@program
def roberta_large_infer_mask():
    from transformers import RobertaConfig, RobertaModel

    c = RobertaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        vocab_size=50265,
        max_position_embeddings=514,
    )
    m = RobertaModel(c, add_pooling_layer=False).to(dev, torch.float16)
    a = torch.ones(32, 256, dtype=torch.long, device=dev)
    a[::2, 200:] = 0
    return infer(m, input_ids=ids(32, 256), attention_mask=a)


@program
def encoder_tf32_train():
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    m = nn.TransformerEncoder(layer, 6).to(dev)
    x = torch.randn(32, 256, 512, device=dev)
    return train(m, lambda m: m(x).pow(2).mean(), torch.optim.Adam(m.parameters()), autocast=None)


class Double(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv2d(i, o, 3, padding=1),
            nn.BatchNorm2d(o),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, padding=1),
            nn.BatchNorm2d(o),
            nn.ReLU(),
        )


class UNet(nn.Module):
    def __init__(self, w=(64, 128, 256, 512)):
        super().__init__()
        self.down = nn.ModuleList(Double(i, o) for i, o in zip((3, *w[:-1]), w, strict=True))
        self.mid = Double(w[-1], 2 * w[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * o, o, 2, 2) for o in reversed(w))
        self.up = nn.ModuleList(Double(2 * o, o) for o in reversed(w))
        self.head = nn.Conv2d(w[0], 2, 1)

    def forward(self, x):
        skips = []
        for d in self.down:
            x = d(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for t, u, s in zip(self.ups, self.up, reversed(skips), strict=True):
            x = u(torch.cat([s, t(x)], 1))
        return self.head(x)


@program
def unet_train():
    m = UNet().to(dev)
    x, y = torch.randn(8, 3, 256, 256, device=dev), torch.randint(0, 2, (8, 256, 256), device=dev)
    return train(m, lambda m: F.cross_entropy(m(x), y), torch.optim.Adam(m.parameters()), torch.float16)


@program
def deepseek_train():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    c = DeepseekV3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        moe_intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        q_lora_rank=512,
        kv_lora_rank=256,
        first_k_dense_replace=1,
        use_cache=False,
    )
    return train_language_model(DeepseekV3ForCausalLM(c).to(dev, bf16), 4, 1024)


@program
def flex_document_train():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s = 8192
    doc = torch.arange(s, device=dev) // 1500
    block = create_block_mask(lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), None, None, s, s, device=dev)
    flex = torch.compile(flex_attention)
    q, k, v = (torch.randn(2, 16, s, 128, device=dev, dtype=bf16, requires_grad=True) for _ in range(3))

    def step():
        flex(q, k, v, block_mask=block).sum().backward()
        q.grad = k.grad = v.grad = None

    return step


@program
def fp8_rowwise_prefill():
    from torch.nn import Parameter

    class Fp8Linear(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.w = Parameter(torch.empty(o, i, device=dev, dtype=torch.float8_e4m3fn), requires_grad=False)
            self.s = Parameter(torch.ones(1, o, device=dev), requires_grad=False)

        def forward(self, x):
            a = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
            q = (x.float() / a).clamp(-448, 448).to(torch.float8_e4m3fn)
            return torch._scaled_mm(q, self.w.t(), a, self.s, out_dtype=bf16)

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.u, self.d = Fp8Linear(4096, 14336), Fp8Linear(4096, 14336), Fp8Linear(14336, 4096)

        def forward(self, x):
            return x + self.d(F.silu(self.g(x)) * self.u(x))

    m = nn.Sequential(*(Mlp() for _ in range(4)))
    return infer(m, torch.randn(2048, 4096, device=dev, dtype=bf16))


if __name__ == "__main__":
    torch.manual_seed(0)
    step = P[sys.argv[1]]()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
