"""Differential testing: random training scripts in plain PyTorch and on real ranks.

`python -m benchmarks.differential --scripts 500 --workers 8 --json out.json` writes random
training scripts, runs each once in plain PyTorch and once with Shardwise on 2 to 4 gloo
processes, in float64, and compares losses, gradients, parameters and buffers.

A script passes if both runs agree, or if Shardwise refuses it and names the right place: a line
of the script that belongs to one of its features, or the parameter or input concerned.
"""
