"""A trainer on megatron-core: data, model, optimizer, checkpoints and parallelism are Megatron's own."""
