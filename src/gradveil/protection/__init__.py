"""Defences inside a training loop: what a defence is, hooks on the loop, gradients of single records."""
