"""Writes a small Llama in Hugging Face's layout, with random weights, by the library transformers.

    python make_model.py FOLDER            FOLDER/config.json and model.safetensors; FOLDER/reference.safetensors has some
                                           tokens and the logits that transformers computes for them
    python make_model.py FOLDER --compare  opens the folder as it is now, and prints the largest difference of its logits
                                           from those in reference.safetensors

Needs torch, transformers and safetensors. finetuning.cpp has the same sizes.
"""

import argparse
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--compare", action="store_true")
options = parser.parse_args()
reference = options.folder / "reference.safetensors"

if options.compare:
    expected = load_file(reference)
    model = LlamaForCausalLM.from_pretrained(options.folder).eval()
    with torch.no_grad():
        logits = model(expected["tokens"]).logits
    print(f"largest difference {(logits - expected['logits']).abs().max():.5g}")
else:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, initializer_range=0.1,
                         tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(options.folder)
    tokens = torch.randint(config.vocab_size, (2, 32))
    with torch.no_grad():
        save_file({"tokens": tokens, "logits": model(tokens).logits}, reference)
