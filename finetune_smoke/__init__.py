"""Does this cluster really train? A LoRA fine-tune on function calls, with exact checks beside the loss.

``python -m finetune_smoke --preset tiny`` or ``torchrun --nproc-per-node=8 -m finetune_smoke --preset small``; from
code ``finetune_smoke.train.finetune(finetune_smoke.config.preset("small"))``. Needs torch, transformers and peft, no
network and no files: tokenizer, data and base model are made from a seed.
"""
