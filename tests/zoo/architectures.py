"""Which architectures the zoo holds: transformers' own lists of language models, and what is no text decoder.

A name is transformers' model type. The lists are read from the installed transformers, so a new release shows up here
without a change; what cannot be judged by a tiny model of random weights is named with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from transformers.models.auto import modeling_auto

# Models of text and images or audio without a class for text alone, and without one in the other lists: their text.
_LISTED = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    | modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
)
_OF_SEVERAL_INPUTS = getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {})  # not in 5.17
_OF_SEVERAL_INPUTS = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | _OF_SEVERAL_INPUTS
_MULTIMODAL = {name: class_name for name, class_name in _OF_SEVERAL_INPUTS.items() if name not in _LISTED}

FAMILIES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "multimodal": _MULTIMODAL,
}

# (family, name) -> why it is not a text decoder (or text encoder) at all.
_DRAFTER = "drafts tokens from another model's hidden states, keys and values: it has no prompt of its own"
_AUDIO_CODES = "its tokens are four parallel codebooks of audio, not one sequence of text"
_WITH_IMAGES = (
    "blip blip-2 idefics instructblip instructblipvideo kosmos-2 kosmos-2.5 pi0 pix2struct pp_formulanet udop "
    "vision-encoder-decoder"
)
_OTHER_INPUTS = {
    **dict.fromkeys(_WITH_IMAGES.split(), "every prompt needs an image: there is no prompt of text alone"),
    "diffusion_gemma": "fills blocks of tokens by diffusion, not one token after the other",
    "evolla": "every prompt needs a protein",
    "kyutai_speech_to_text": "every step needs codes of audio beside the text token",
}
NOT_TEXT: dict[tuple[str, str], str] = {
    ("causal", "gemma4_assistant"): _DRAFTER,
    ("causal", "gemma4_unified_assistant"): _DRAFTER,
    ("causal", "musicgen"): _AUDIO_CODES,
    ("causal", "musicgen_melody"): _AUDIO_CODES,
    ("seq2seq", "voxtral_realtime"): "every step needs a piece of audio beside the text token",
    **{
        ("multimodal", name): reason for name, reason in _OTHER_INPUTS.items() if name in _MULTIMODAL
    },  # not in 5.17
}


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo: a model type as one family's list has it."""

    family: str
    name: str
    class_name: str

    @property
    def model_class(self) -> type:
        return getattr(transformers, self.class_name)

    @property
    def config_class(self) -> type:
        """The config that the class takes; of a text model listed under a composite type, the text part's."""
        listed = transformers.CONFIG_MAPPING[self.name]
        taken = self.model_class.config_class
        parts = tuple(getattr(listed, "sub_configs", {}).values())
        return taken if taken in parts else listed


def architectures(family: str) -> list[Architecture]:
    return [Architecture(family, name, cls) for name, cls in sorted(FAMILIES[family].items())]
