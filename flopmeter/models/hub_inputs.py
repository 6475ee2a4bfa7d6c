"""Arguments for a model of Hugging Face's transformers: token ids, an image, sound, as its config has them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

DEFAULT_TOKENS = 512
SOUNDS = ("input_features", "input_values")  # a spectrogram or samples, by the names that transformers gives them
SOUND_SECONDS = 10.0  # of a model that takes a recording of any length
SAMPLES_PER_S = 16_000  # of speech models that do not say their rate
WRITE_A_FUNCTION = "write a function that returns (model, inputs) and give file.py:function"


class TargetError(ValueError):
    """A target that cannot be found, built or run; the message says what to do."""


def inputs_of(model: Any, config: Any, batch: int, seq: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of forward. Token ids and masks are real, so that their values are known under the meter; images and
    sound are on meta. `seq` is the number of tokens; None takes 512, or all positions if the model has fewer. Raises
    TargetError for inputs that no config describes."""
    name, parameters = model.main_input_name, inspect.signature(model.forward).parameters
    if name == "input_ids":
        inputs = _text(config, batch, seq, has_mask="attention_mask" in parameters)
        if "pixel_values" in parameters and not _puts_images_into_text(config):
            inputs["pixel_values"] = _image(config, batch, dtype)
    elif name == "pixel_values":
        if seq is not None:
            raise TargetError(f"{type(model).__name__} takes images, no seq")
        return {name: _image(config, batch, dtype)}
    else:
        sound = _sound(config, name)
        if sound is None:
            raise TargetError(
                f"{type(model).__name__} takes {name}, which flopmeter does not make up: {WRITE_A_FUNCTION}"
            )
        inputs = {name: torch.empty(batch, *sound, dtype=dtype, device="meta")}
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = inputs["input_ids"].clone() if "input_ids" in inputs else _ids(config, batch, seq)
    elif seq is not None and "input_ids" not in inputs:
        raise TargetError(f"{type(model).__name__} takes sound, no seq")
    return inputs


def _text(config: Any, batch: int, seq: int | None, has_mask: bool) -> dict[str, Any]:
    ids = _ids(config, batch, seq)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if has_mask else {"input_ids": ids}


def _ids(config: Any, batch: int, seq: int | None) -> Tensor:
    return token_ids(config, batch, _length(_text_config(config), seq))


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if config.is_encoder_decoder else config.get_text_config()


def token_ids(config: Any, batch: int, length: int) -> Tensor:
    """Rows of distinct small ids, beyond those that are padding or marks in most vocabularies."""
    vocabulary: int = getattr(_text_config(config), "vocab_size", 0)
    if not vocabulary:
        raise TargetError(
            f"the config of {config.model_type} has no vocab_size, so that token ids cannot be made up: "
            f"{WRITE_A_FUNCTION}"
        )
    first = min(5, vocabulary - 1)
    return (first + torch.arange(length) % min(1000, vocabulary - first)).repeat(batch, 1)


def _length(text: Any, seq: int | None) -> int:
    for name in ("max_position_embeddings", "max_target_positions"):
        most = getattr(text, name, None)
        if isinstance(most, int) and most > 0:
            if seq is not None and seq > most:
                raise TargetError(f"seq {seq} is beyond the model's {most} positions ({name} in its config)")
            return min(DEFAULT_TOKENS, most) if seq is None else seq
    return seq or DEFAULT_TOKENS


def _puts_images_into_text(config: Any) -> bool:
    """A model that speaks about images has a token for them, and runs on text alone too; one that compares both, such
    as CLIP, needs both."""
    return any(hasattr(config, name) for name in ("image_token_id", "image_token_index", "boi_token_id"))


def _image(config: Any, batch: int, dtype: torch.dtype) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(vision, "num_channels", None) or 3
    return torch.empty(batch, channels, height, width, dtype=dtype, device="meta")


def _sound(config: Any, name: str) -> tuple[int, ...] | None:
    """The shape of one recording: a spectrogram as long as the positions of Whisper's encoder after its convolution of
    stride 2, that of a spectrogram transformer, or the samples that convolutions of wav2vec 2.0's kind take."""
    spectrogram, samples = SOUNDS
    bins: int = getattr(config, "num_mel_bins", 0)
    if name == spectrogram and bins and getattr(config, "max_source_positions", None):
        return bins, 2 * config.max_source_positions
    if name == samples and hasattr(config, "time_stride"):  # of the patches of a spectrogram
        length: int = config.max_length
        return length, bins
    if name == samples and hasattr(config, "conv_stride"):
        return (round(SOUND_SECONDS * (getattr(config, "sampling_rate", None) or SAMPLES_PER_S)),)
    return None
