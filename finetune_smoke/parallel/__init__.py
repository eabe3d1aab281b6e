"""How ranks share a training: DDP, FSDP2, copy-engine gathers, CUDA graphs."""
