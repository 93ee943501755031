"""Executes step plans and decides nothing: memory, streams, gradients, and on-demand fetches."""
