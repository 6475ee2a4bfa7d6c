"""The built-in models compute what those of transformers do with the same weights, and configs of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter import models
from flopmeter.models import bert, diffusion, gpt2, llama, vision
from flopmeter.models.hub_inputs import TargetError
from flopmeter.models.hubs import config_of_llama, hub_config, huggingface

transformers = pytest.importorskip("transformers")

TRANSPOSED = "Conv1D"  # transformers' linear layer of GPT-2, whose weight is [in, out]


def weight_of(module):
    return module.weight.T if type(module).__name__ == TRANSPOSED else module.weight


def kind_of(module):
    kinds = (nn.Linear, nn.Conv2d, nn.Embedding, nn.BatchNorm2d)
    is_linear = type(module).__name__ == TRANSPOSED
    return nn.Linear if is_linear else next((kind for kind in kinds if isinstance(module, kind)), "norm")


def with_weights(model):
    """By place; a block's shortcut first, as transformers registers it."""
    found = [(name, module) for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    blocks = list(dict.fromkeys(name.partition(".shortcut")[0] for name, _ in found if ".shortcut" in name))

    def key(place):
        name = found[place][0]
        block = next((each for each in blocks if name.startswith(f"{each}.")), None)
        first = next(at for at, (each, _) in enumerate(found) if block is None or each.startswith(f"{block}."))
        return (place if block is None else first, ".shortcut" not in name, place)

    return [found[place][1] for place in sorted(range(len(found)), key=key)]


@torch.no_grad()
def give_weights(theirs, own):
    """Each layer of theirs gets numbers, and the next layer of `own` of its kind and shape the same; a layer for
    queries, keys and values has those of three."""
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn_like(parameter) / max(parameter.shape[-1], 4) ** 0.5 + 0.1)
    left, given = with_weights(theirs), set()

    def taken(kind, shape):
        for place, module in enumerate(left):
            if (kind_of(module), weight_of(module).shape) == (kind, shape):
                given.add(module.weight.data_ptr())
                return left.pop(place)
        return None

    for module in with_weights(own):
        sources = [taken(kind_of(module), module.weight.shape)]
        if sources == [None]:
            rows, width = module.weight.shape
            sources = [taken(nn.Linear, torch.Size((rows // 3, width))) for _ in range(3)]
        module.weight.copy_(torch.cat([weight_of(each) for each in sources]))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.cat([each.bias for each in sources]))
    assert {each.weight.data_ptr() for each in left} <= given  # the same weights twice


def ids():
    return torch.randint(0, 50, (2, 7))


def image():
    return torch.randn(2, 3, 64, 64)


def of_gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), models.GPT2(gpt2.GPT2Config(2, 32, 4, 50, 8)), (ids(),)


def of_llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), models.Llama(llama.LlamaConfig(2, 32, 4, 2, 48, 50)), (ids(),)


def of_bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=8,
    )  # fmt: skip
    segments = {"token_type_ids": torch.randint(0, 2, (2, 7))}
    return transformers.BertForMaskedLM(config), models.Bert(bert.BertConfig(2, 32, 4, 50, 8)), (ids(), segments)


def of_vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=8,
        layer_norm_eps=1e-6, num_labels=vision.CLASSES,
    )  # fmt: skip
    own = models.ViT(vision.ViTConfig(2, 32, 4, patch=8), 64)
    return transformers.ViTForImageClassification(config), own, (image(),)


def of_resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2], num_labels=vision.CLASSES
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config), models.ResNet((1, 2), width=8), (image(),)


def of_convnext():
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, layer_norm_eps=1e-6, num_labels=vision.CLASSES
    )  # fmt: skip
    return transformers.ConvNextForImageClassification(config), models.ConvNeXt((1, 2), (8, 16)), (image(),)


@pytest.mark.parametrize("made", [of_gpt2, of_llama, of_bert, of_vit, of_resnet, of_convnext])
def test_a_builtin_computes_what_the_model_of_transformers_does_with_its_weights(made):
    torch.manual_seed(0)
    theirs, own, (x, *rest) = made()
    give_weights(theirs, own)
    with torch.no_grad():
        if isinstance(own, models.ViT):
            own.class_token.copy_(theirs.vit.embeddings.cls_token)
            own.position.copy_(theirs.vit.embeddings.position_embeddings)
        blocks = [each for each in own.modules() if isinstance(each, vision.ConvNeXtBlock)]
        scales = [each for name, each in theirs.named_parameters() if "layer_scale" in name]
        for block, scale in zip(blocks, scales, strict=True):
            block.scale.copy_(scale)
        wanted = theirs.eval()(x, **(rest[0] if rest else {})).logits
        found = own.eval()(x, *(rest[0].values() if rest else ()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_last_layer_of_dit_shifts_and_scales_by_the_condition():
    """Its blocks do nothing where their modulation is zero; the condition is left out by a weight of zero."""
    torch.manual_seed(0)
    model = models.DiT(diffusion.DiTConfig(1, 32, 4, classes=9), 8)
    latent, shift, scale = torch.randn(2, 4, 8, 8), torch.randn(32), torch.randn(32)
    with torch.no_grad():
        for layer in (model.blocks[0].modulation, model.modulation):
            layer.weight.zero_()
            layer.bias.zero_()
        model.modulation.bias.copy_(torch.cat([shift, scale]))
        x = model.patches(latent).flatten(2).transpose(1, 2) + model.position
        normed = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
        wanted = model.unpatch(model.head(normed * (1 + scale) + shift), 4)
        found = model(latent, torch.tensor([0, 7]), torch.tensor([1, 2]))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_residual_net_writes_its_rectified_numbers_in_place():
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names(), torch.no_grad():
        models.ResNet((1, 2), width=8)(image())
    assert (seen.count("relu_"), seen.count("relu")) == (1 + 3 * 3, 0)


def config_file(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **fields}))
    return str(path)


def test_a_config_is_that_of_its_type_or_of_the_first_architecture_that_is_known(tmp_path):
    known = ["NobodysModel", "GPT2LMHeadModel", "LlamaForCausalLM"]
    found = hub_config(config_file(tmp_path, model_type="new", architectures=known, n_embd=48))
    assert (found.model_type, found.n_embd) == ("gpt2", 48)
    assert hub_config(config_file(tmp_path, architectures=known)).model_type == "llama"
    assert hub_config(str(tmp_path)).model_type == "llama"  # the folder of the file
    assert hub_config("gpt2").model_type == "gpt2"
    own = llama.LlamaConfig(2, 64, 4, 2, 48, 50, norm_epsilon=1e-3)
    made = config_of_llama(own)
    assert (made.num_hidden_layers, made.hidden_size, made.num_attention_heads, made.num_key_value_heads) == (
        2,
        64,
        4,
        2,
    )
    assert (made.intermediate_size, made.vocab_size, made.rms_norm_eps, made.dtype) == (48, 50, 1e-3, torch.bfloat16)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"architectures": []}', 'is no model config: it lacks "model_type", such as "llama"'),
        ("{", "is no model config (JSONDecodeError"),
        ("[1]", "is no model config (TypeError"),
        ('{"model_type": "new"}', "transformers knows no model type 'new'; a newer version may"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "transformers refuses this config"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, content, told):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TargetError) as refused:
        hub_config(str(path))
    assert str(refused.value).startswith(str(path))
    assert told in str(refused.value)


def test_a_type_that_there_is_not_is_one_line_with_those_near_to_it():
    with pytest.raises(TargetError, match=r"no model type 'llamma'; near to it: .*llama.* \(or give"):
        hub_config("llamma")
    with pytest.raises(TargetError, match="no model type '~~~~'; near to it: nothing"):
        hub_config("~~~~")


@pytest.mark.parametrize(
    ("kind", "architecture", "from_what"),
    [
        ("gpt2", "GPT2LMHeadModel", "input_ids"), ("llama", "LlamaForCausalLM", "input_ids"),
        ("llama", "LlamaModel", None),
        ("bert", "BertForMaskedLM", "input_ids"), ("t5", "T5ForConditionalGeneration", "decoder_input_ids"),
    ],
)  # fmt: skip
def test_a_model_with_a_loss_gets_its_own_tokens_as_labels_where_it_is_trained(tmp_path, kind, architecture, from_what):
    small = {"hidden_size": 32, "n_embd": 32, "d_model": 32, "num_attention_heads": 4, "n_head": 4, "num_heads": 4,
             "num_hidden_layers": 1, "n_layer": 1, "num_layers": 1, "vocab_size": 64}  # fmt: skip
    build = huggingface(config_file(tmp_path, model_type=kind, architectures=[architecture], **small))
    model, inputs = build(2, 8, train=True)
    assert type(model).__name__ == architecture
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert "labels" not in build(2, 8)[1]
    assert ("labels" in inputs) == (from_what is not None)
    if from_what is not None:
        assert torch.equal(inputs["labels"], inputs[from_what])
        assert inputs["labels"] is not inputs[from_what]
