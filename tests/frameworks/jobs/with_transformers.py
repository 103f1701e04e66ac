"""Hugging Face's Trainer; arguments: ``gpt2`` or ``llama``, micro-batches per step, optionally a stage of DeepSpeed's ZeRO."""

import sys
import tempfile
from typing import Any

import torch
from common import show, tell
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH, STEPS = 64, 16, 8


def model(kind: str) -> Any:
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))


class Shown(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            show(float(logs["loss"]))


def main() -> None:
    kind, accumulate, *stage = sys.argv[1:]
    torch.set_num_threads(1)
    set_seed(1)
    source = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, VOCABULARY, (LENGTH,), generator=source) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    zero = (
        {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": int(stage[0])},
            "zero_allow_untested_optimizer": True,
        }
        if stage
        else None
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=int(accumulate),
            logging_steps=1,
            log_on_each_node=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            deepspeed=zero,
        )
        trainer = Trainer(model(kind), arguments, train_dataset=data, callbacks=[Shown()])
        trainer.train()
        tell(trainer.state.global_step)


if __name__ == "__main__":
    main()
