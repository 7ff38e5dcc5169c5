"""Which kind of model this is: a decoder, an encoder-decoder, or an encoder alone (BERT and its relatives).

transformers' own tables say it: a model type that has a class for masked language models is an encoder, unless its
config turns it into a decoder (`is_decoder`). Only classes whose output has one row for each token count.

A model of text and images or audio is the decoder of its text. Where transformers has no class for that alone, it is
the class for all of them, called with token ids only.
"""

from __future__ import annotations

from pathlib import Path

ENCODER_CLASS_SUFFIXES = ("EncoderModel",)  # T5EncoderModel: the first half of an encoder-decoder
# A sentence-transformers directory pools hidden states, whatever head its checkpoint was trained with.
SENTENCE_MODULES = "modules.json"


def is_encoder_only(module) -> bool:
    """Is this transformers model an encoder with one row of output for each token?"""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_decoder", False) or getattr(config, "causal", False):
        return False  # XLM and Flaubert say `causal`
    return type(module).__name__ in _encoder_classes(getattr(config, "model_type", None))


def is_headless(module) -> bool:
    """Is this a transformers model of a kind that writes text, without the head that does?"""
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ in _bare_classes(model_type) - _writers(model_type) and not is_encoder_only(
        module
    )


def auto_class(config, path: Path | None = None):
    """transformers' factory for a config: of causal, sequence-to-sequence or masked language models, or encoders."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    if getattr(config, "is_encoder_decoder", False):
        return _of_several_inputs(config) or AutoModelForSeq2SeqLM
    (wanted,) = (getattr(config, "architectures", None) or [""])[:1]
    classes = _encoder_classes(getattr(config, "model_type", None))
    if wanted not in classes or getattr(config, "is_decoder", False):
        return _of_several_inputs(config) or AutoModelForCausalLM
    has_head = wanted == _tables()[0].get(config.model_type)
    pooled = path is not None and (path / SENTENCE_MODULES).exists()
    return AutoModelForMaskedLM if has_head and not pooled else AutoModel


def text_config(config):
    """Of a multimodal config that of its text, else the config."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def parts_beside_text(config) -> list[str]:
    """The configs that a multimodal config holds beside that of its text ("vision_config")."""
    text = text_config(config)
    if text is config:
        return []
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return [name for name, part in parts.items() if part is not None and part is not text]


def _of_several_inputs(config):
    """The factory of multimodal models, for a config that none of text alone takes; else None."""
    import transformers
    from transformers.models.auto import modeling_auto as tables

    of_text = (tables.MODEL_FOR_CAUSAL_LM_MAPPING, tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    if any(type(config) in mapping for mapping in of_text):
        return None
    for kind in ("MultimodalLM", "ImageTextToText"):  # 5.17 has the second alone
        factory = getattr(transformers, f"AutoModelFor{kind}", None)
        if factory is not None and type(config) in factory._model_mapping:
            return factory
    return None


def _tables() -> tuple[dict, ...]:
    """model type -> class name: with a masked-LM head, bare, text encoder, with a head for each token."""
    from transformers.models.auto import modeling_auto as tables

    return (
        tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        tables.MODEL_MAPPING_NAMES,
        tables.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
        tables.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )


def _bare_classes(model_type: str | None) -> set[str]:
    names = _tables()[1].get(model_type, ())
    return {names} if isinstance(names, str) else set(names)


def _writers(model_type: str | None) -> set[str]:
    """Classes that a table of models with heads has, too: those of some kinds are their own heads."""
    from transformers.models.auto import modeling_auto as tables

    names = (tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return {table.get(model_type) for table in names} - {None}


def _encoder_classes(model_type: str | None) -> set[str]:
    masked, _, text, per_token = _tables()
    found = {text.get(model_type, "")} if text.get(model_type, "").endswith(ENCODER_CLASS_SUFFIXES) else set()
    if model_type in masked:
        heads = {masked[model_type]} if "ConditionalGeneration" not in masked[model_type] else set()
        if not heads:
            return found
        found |= heads | {per_token.get(model_type, "")} | _bare_classes(model_type)
    return found - {""}
