"""A small Llama trained by Hugging Face's Trainer on the backend "shoal": make the process group first, and it is used.

    torchrun --nproc-per-node 2 with_transformers.py TEXT RUN      TEXT: a file; RUN: folder for Trainer's checkpoints
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shoal


def main() -> None:
    text, run = map(Path, sys.argv[1:])
    dist.init_process_group("shoal")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in data[: len(data) // 64 * 64].view(-1, 64)]
    arguments = TrainingArguments(
        output_dir=str(run),
        use_cpu=True,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        max_steps=100,
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        ranks, transport = arguments.world_size, shoal.distributed.group_of().transport
        print(f"loss {losses[0]} to {losses[-1]} on {ranks} ranks over {transport}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
