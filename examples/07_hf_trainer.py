"""Run `transformers.Trainer` with a plan: change the class and add an argument.

python examples/07_hf_trainer.py
torchrun --nproc-per-node 2 examples/07_hf_trainer.py --plan pipeline --lora
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from shardwise.integrations.huggingface import ShardwiseTrainer


def sentences(rows: int) -> Dataset:
    """Return rows of consecutive bytes, whose first labels are ignored."""
    ids = [[(7 * row + place) % 256 for place in range(32)] for row in range(rows)]
    labels = [[-100] * (row % 8) + row_ids[row % 8 :] for row, row_ids in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def main() -> None:
    """Train, evaluate, save, and load the saved model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", default="ddp", help="auto, a strategy, or a plan file")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", default="out-hf")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4))
    if options.lora:
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    trainer = ShardwiseTrainer(
        model,
        TrainingArguments(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=sentences(64),
        eval_dataset=sentences(16),
        plan=options.plan,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # on all ranks; rank 0 writes
    if trainer.is_world_process_zero():
        print(f"{trainer.plan.name}: loss {loss:.4f} after {options.steps} steps")
        if not options.lora:
            saved = GPT2LMHeadModel.from_pretrained(options.out)
            same = torch.equal(saved.transformer.wte.weight, model.transformer.wte.weight)
            print(f"{options.out} loads with from_pretrained: {same}")


if __name__ == "__main__":
    main()
